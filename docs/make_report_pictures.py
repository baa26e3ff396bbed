"""Screenshots of how-to/report.md and how-to/compare.md, from the page of a real run.

    patchloom pretrain shapes && patchloom report runs/shapes-droppos
    python docs/make_report_pictures.py runs/shapes-droppos/report.html

The page of a run gives report-head.png, report-map.png and report-phone.png in docs/_pictures; the page of a
comparison gives compare-page.png.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "support"))


def take(started: Any, page: Path) -> None:
    """Take all screenshots of a page."""
    tab = _opened(started, page, 1280, 940, "light")
    if tab.title().startswith("Comparison"):
        _save(tab.screenshot(), "compare-page")
        return
    _save(tab.screenshot(), "report-head")
    tab = _opened(started, page, 1280, 900, "dark")
    _choose(tab)
    _save(tab.locator(".map").first.screenshot(), "report-map")
    phone = [_opened(started, page, 390, 844, scheme) for scheme in ("light", "dark")]
    _choose(phone[1])
    phone[1].evaluate("document.querySelector('.map .field').scrollIntoView()")
    pictures = [Image.open(io.BytesIO(tab.screenshot())) for tab in phone]
    together = Image.new("RGB", (2 * pictures[0].width + 20, pictures[0].height), "white")
    for i, picture in enumerate(pictures):
        together.paste(picture, (i * (picture.width + 20), 0))
    written = io.BytesIO()
    together.save(written, "png")
    _save(written.getvalue(), "report-phone")


def _opened(started: Any, page: Path, width: int, height: int, scheme: str) -> Any:
    tab = started.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    tab.goto(page.resolve().as_uri())
    return tab


def _choose(tab: Any) -> None:
    """Select an image of the map by keyboard, so that it stays shown and its neighbours are listed."""
    tab.locator(".map .field").first.focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowRight", "Enter"):
        tab.keyboard.press(key)


def _save(picture: bytes, name: str) -> None:
    """Save a screenshot with 256 colours, which are enough here, to stay below 200 kB."""
    path = HERE / "_pictures" / f"{name}.png"
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Take the screenshots of the given page."""
    from browsing import browser, missing

    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    if why := missing():
        sys.exit(why)
    with browser() as started:
        take(started, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
