"""A real browser, where there is one: Chromium or Chrome of the machine, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing() -> str:
    """Why no browser can be started, or ""."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs Playwright: pip install '.[test]'"
    if not any(map(shutil.which, NAMES)):
        return "needs Chromium: apt-get install chromium"
    return ""


@contextmanager
def browser() -> Iterator[Any]:
    """Headless; closed at the end, as is the loop that Playwright runs, which would be in the way of other tests."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=program)
        try:
            yield started
        finally:
            started.close()
