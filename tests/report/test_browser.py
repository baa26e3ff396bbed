"""Browser tests of the page: mouse, keyboard, no network requests, and the accessibility rules of axe-core."""

import json
from importlib.util import find_spec
from pathlib import Path

import pages
import pytest
from browsing import browser, missing

from patchloom.report.page import render

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "a browser is there")]

SIZES = {"narrow": {"width": 390, "height": 844}, "wide": {"width": 1440, "height": 900}}


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {"one": pages.one_run(), "three": pages.comparison(), "hostile": pages.hostile()}
    for name, page in made.items():
        (folder / f"{name}.html").write_text(render(page), "utf-8")
    return {name: folder / f"{name}.html" for name in made}


class Visit:
    """Open page that records its errors, dialogs and requests."""

    def __init__(self, chromium, path: Path, size: str = "wide", **context):
        self.context = chromium.new_context(viewport=SIZES[size], **context)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(20_000)
        self.trouble: list[str] = []
        self.tab.on("console", lambda message: self.trouble.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        address = path.as_uri()
        self.tab.on("request", lambda one: one.url.startswith((address, "data:")) or self.trouble.append(one.url))
        self.tab.goto(address)

    def __enter__(self):
        return self.tab

    def __exit__(self, *error):
        self.context.close()
        if not error[0]:
            assert not self.trouble


def spot(tab, i: int) -> tuple[float, float]:
    tab.locator(".map .field").first.scroll_into_view_if_needed()
    tab.evaluate("document.querySelectorAll('.dot').forEach((one) => { one.style.transition = 'none'; })")
    box = tab.locator(".map").first.locator(".dot").nth(i).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize(("name", "size"), [("one", "narrow"), ("three", "wide"), ("hostile", "narrow")])
def test_opens_without_an_error_and_fits(chromium, written, name, size):
    with Visit(chromium, written[name], size) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == SIZES[size]["width"]
        assert tab.locator(".axes .line").count() and tab.locator(".dot").count()
        beyond = "all => all.filter(o => o.offsetWidth > o.closest('.wide').clientWidth).map(o => o.innerText)"
        assert tab.locator(".wide caption").count() and not tab.locator(".wide caption").evaluate_all(beyond)


def test_the_map_by_mouse(chromium, written):
    cloud = pages.cloud()
    with Visit(chromium, written["one"]) as tab:
        tip, panel = tab.locator(".field .tip"), tab.locator(".panel")
        tab.mouse.move(*spot(tab, 7))
        assert tip.inner_text().split("\n")[0] == cloud.names[7]
        colours = "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
        assert tip.locator("canvas").evaluate(colours) > 2  # the thumbnail
        tab.mouse.click(*spot(tab, 7))
        listed = panel.locator("li")
        assert listed.locator("b").all_inner_texts() == [cloud.names[i] for i in cloud.neighbours[7]]
        assert f"similarity {cloud.similarities[7][0]:.2f}" in listed.first.inner_text()
        assert listed.locator("canvas").count() == 8 and panel.get_attribute("aria-live") == "polite"
        listed.first.locator("button").click()  # and so on, from neighbour to neighbour
        assert panel.locator(".asked b").inner_text() == cloud.names[cloud.neighbours[7][0]]
        tab.mouse.move(2, 2)
        assert tip.is_hidden()
        before = spot(tab, 7)
        tab.get_by_label("t-SNE").check()
        after = spot(tab, 7)
        assert abs(after[0] - before[0]) + abs(after[1] - before[1]) > 5
        star = tab.locator(".map .legend button", has_text="star")
        star.click()
        assert star.get_attribute("aria-pressed") == "true" and tab.locator(".dot.faded").count() == 45
        star.click()
        assert tab.locator(".dot.faded").count() == 0


def test_the_map_by_keyboard(chromium, written):
    with Visit(chromium, written["one"]) as tab:
        tab.locator(".field").focus()
        tab.keyboard.press("ArrowRight")
        first = tab.locator(".field .tip b").inner_text()
        assert tab.locator("#told").inner_text().startswith(first)
        tab.keyboard.press("ArrowUp")
        second = tab.locator(".field .tip b").inner_text()
        tab.keyboard.press("Enter")
        assert tab.locator(".panel .asked b").inner_text() == second != first
        tab.locator("[type=search]").fill("star/0003")
        tab.keyboard.press("Enter")
        tab.keyboard.press("Tab")
        assert tab.locator(".panel .asked b").inner_text() == "star/0003.png"


def ticks(tab) -> list[float]:
    texts = tab.locator(".axes").first.locator("text[text-anchor=middle]").all_text_contents()[:-1]
    return [float(text) for text in texts]


def test_a_curve_is_read_and_zoomed_by_mouse(chromium, written):
    with Visit(chromium, written["three"]) as tab:
        axes, whole = tab.locator(".axes").first, ticks(tab)
        axes.scroll_into_view_if_needed()
        box = axes.bounding_box()
        middle = box["y"] + box["height"] / 2
        tab.mouse.move(box["x"] + 0.6 * box["width"], middle)
        tip = tab.locator(".canvas .tip").first.inner_text()
        assert "shapes-mae" in tip and "raw pixels" in tip and "17.0 %" in tip
        tab.mouse.down()
        tab.mouse.move(box["x"] + 0.8 * box["width"], middle, steps=4)
        tab.mouse.up()
        near = ticks(tab)
        assert near[-1] - near[0] < 0.3 * (whole[-1] - whole[0])
        tab.mouse.dblclick(box["x"] + 0.5 * box["width"], middle)
        assert ticks(tab) == whole
        lines = axes.locator(".line")
        tab.locator(".chart .legend button", has_text="shapes-mae").click()
        assert lines.count() == 3  # of 4
        hole = lines.first.get_attribute("d")  # is not bridged
        assert hole.count("M") == 2 and "NaN" not in hole


def test_a_curve_is_read_and_zoomed_by_keyboard_and_buttons(chromium, written):
    chart = pages.chart(["shapes-droppos", "shapes-mae", "shapes-mp3"])
    with Visit(chromium, written["three"]) as tab:
        whole, reset = ticks(tab), tab.get_by_label("Show all of kNN accuracy, held-out images").first
        tab.locator(".axes").first.focus()
        for key in ("Home", "ArrowRight"):
            tab.keyboard.press(key)
        told = tab.locator("#told").inner_text()
        assert told.startswith("epochs 3.33:") and f"shapes-mae {100 * chart.lines[1].y[1]:.1f} %" in told
        tab.keyboard.press("+")
        assert ticks(tab)[-1] < whole[-1]
        tab.keyboard.press("Escape")
        assert ticks(tab) == whole and reset.is_disabled()
        tab.get_by_label("Zoom in").first.click()
        assert ticks(tab) != whole
        reset.click()
        assert ticks(tab) == whole


def test_theme_and_print(chromium, written):
    ground = "getComputedStyle(document.body).backgroundColor"
    is_open = "document.querySelector('.settings').open"  # settings are unfolded on paper alone
    for scheme, other in (("light", "Dark theme"), ("dark", "Light theme")):
        with Visit(chromium, written["one"], color_scheme=scheme) as tab:
            before = tab.evaluate(ground)
            tab.get_by_role("button", name=other).click()
            assert tab.evaluate(ground) != before
            tab.emulate_media(media="print")
            assert tab.evaluate(ground) == "rgb(255, 255, 255)"
            assert tab.locator("#theme").is_hidden() and tab.locator("audio").is_hidden()
            tab.emulate_media(media="screen")
            tab.evaluate("addEventListener('beforeprint', () => { window.printed = " + is_open + "; })")
            assert tab.pdf().startswith(b"%PDF")
            assert tab.evaluate("window.printed") and not tab.evaluate(is_open)


def test_pictures_slider_copy_and_sound(chromium, written):
    clip = "(one) => getComputedStyle(one).clipPath"
    with Visit(chromium, written["one"]) as tab:
        small, large = tab.get_by_label("Enlarge: Attention"), tab.locator("#enlarged-picture")
        small.click()
        assert large.get_attribute("src") == small.locator("img").get_attribute("src")
        assert large.bounding_box()["height"] > 600  # of 320 pixels
        tab.get_by_role("button", name="Close").click()
        assert large.is_hidden() and small.evaluate("(one) => document.activeElement === one")
        small.press("Enter")
        assert large.is_visible()
        tab.keyboard.press("Escape")
        assert large.is_hidden()
        tab.locator(".slider input").focus()
        for key, share in (("Home", 0), ("End", 100)):
            tab.keyboard.press(key)
            assert tab.locator(".answer").evaluate(clip) == f"inset(0px 0px 0px {share}%)"
        tab.get_by_role("button", name="Copy").click()
        tab.locator("#told", has_text="opied").wait_for(state="attached")
        tab.wait_for_function("document.querySelector('audio').duration > 0.09")


def test_without_javascript_all_numbers_and_pictures_are_there(chromium, written):
    with Visit(chromium, written["one"], java_script_enabled=False) as tab:
        assert tab.get_by_role("button", name="theme").count() == 0
        tab.locator("summary", has_text="Numbers of this curve").first.click()
        assert tab.locator(".chart").first.locator("tbody tr").count() == 60
        tab.locator("summary", has_text="All 60 images").click()
        assert tab.locator(".sprite").is_visible() and tab.locator(".slider .answer img").is_visible()


def test_hostile_names_do_nothing(chromium, written, tmp_path):
    counts = "[...document.querySelectorAll('img, script, iframe')].length"
    with Visit(chromium, written["hostile"]) as tab:
        before = tab.evaluate(counts)
        for i, name in enumerate(pages.HOSTILE):
            tab.mouse.click(*spot(tab, i))
            asked = tab.locator(".panel .asked b").evaluate("(one) => one.textContent")
            assert asked in pages.HOSTILE, name
        assert tab.locator(".plot").nth(1).inner_text() == "No measurements yet."
        tab.locator(".plot").nth(2).locator(".axes").focus()
        tab.keyboard.press("End")
        assert tab.locator("#told").inner_text() == "epochs 1: one –, two 2"
        tab.locator(".enlarge").first.click()
        assert tab.locator("#enlarged-title").evaluate("(one) => one.textContent") == pages.HOSTILE[0]
        tab.keyboard.press("Escape")
        assert tab.evaluate(counts) == before and tab.title() == f"{pages.HOSTILE[0]} – patchloom"
    # the policy would block the request of a manipulated page, and this test would detect it
    text = written["one"].read_text("utf-8").replace("</main>", '<img src="https://example.org/x.png"></main>')
    (tmp_path / "broken.html").write_text(text, "utf-8")
    visit = Visit(chromium, tmp_path / "broken.html")
    visit.tab.wait_for_timeout(100)
    visit.context.close()
    assert any("Content Security Policy" in one for one in visit.trouble)


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="needs axe-playwright-python, with axe-core")
@pytest.mark.parametrize(("name", "size", "scheme"), [("one", "narrow", "light"), ("three", "wide", "dark")])
def test_axe_finds_nothing_serious(chromium, written, name, scheme, size):
    from axe_playwright_python.sync_playwright import Axe

    with Visit(chromium, written[name], size, color_scheme=scheme, bypass_csp=True) as tab:
        tab.mouse.click(*spot(tab, 7))  # so that the list of neighbours is there
        tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        found = Axe().run(tab).response
    bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert not bad, json.dumps([(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in bad], indent=1)
    assert len(found["passes"]) > 20
