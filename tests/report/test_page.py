"""Tests of the HTML of a page without a browser: contents, escaping, and independence of other files."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pages
import pytest
from pages import value

from patchloom.look.charts import Line, Panel
from patchloom.report.page import (
    FIGURES,
    Number,
    Page,
    RunPart,
    Table,
    _templates,
    bars,
    chart_data,
    chart_rows,
    line_numbers,
    numeric_columns,
    render,
)

VOID = {"meta", "link", "img", "input", "br"}
OURS = {"page.js", "chart.js", "map.js"}


class Tree(HTMLParser):
    """Parser that collects tags, attributes and texts, and checks that tags are balanced."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), f"twice in {tag}: {attributes}"
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.tags)


def data_of(text: str) -> list:
    return [json.loads(found) for found in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)]


@pytest.fixture(scope="module")
def hostile() -> str:
    return render(pages.hostile())


@pytest.fixture(scope="module")
def every() -> dict[str, Page]:
    empty = Page("nothing yet", "2026-11-22T20:00:00Z", "0.1.0")
    bare = replace(empty, runs=[RunPart("bare", "epoch 0 of 1")])
    found = {"empty": empty, "bare": bare, "one": pages.one_run(), "three": pages.comparison()}
    return found | {"hostile": pages.hostile()}


def test_whatever_is_missing_the_file_is_whole(every):
    for name, page in every.items():
        text = render(page)
        tree = Tree(text)
        text.encode("utf-8")
        assert tree.count("h1") == 1 and tree.count("main") == 1, name
        levels = [int(tag[1]) for tag, _ in tree.tags if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1 and max(np.diff(levels), default=0) <= 1, name
        ids = [attributes["id"] for _, attributes in tree.tags if "id" in attributes]
        assert len(ids) == len(set(ids)), name
        for _, attributes in tree.tags:
            for key in ("aria-labelledby", "list"):
                assert attributes.get(key, ids[0]) in ids, f"{name}: {attributes}"
            if attributes.get("href", "").startswith("#"):
                assert attributes["href"][1:] in ids, f"{name}: {attributes}"


def test_order_of_a_run():
    text = render(pages.one_run("bad"))
    told = "It does not learn|and it still rises|Next:|[29.1, 31.3]|Probes of each layer|Measured after"
    told += "|Put together again|Map of embeddings|yes/0001.wav|street/0001.png|fits the memory|broken/0001"
    places = [text.index(one) for one in told.split("|")]
    assert places == sorted(places)
    assert 'class="box bad"' in text


@pytest.mark.parametrize("verdict", ["", "Healthy"])
def test_a_lead_does_not_repeat_a_run(verdict):
    part = RunPart("a", "finished", verdict, why=verdict and "12 % < 20 %", summary="It learnt < half.")
    page = Page("a", "2026-11-22T20:00:00+00:00", "0.1.0", [part.why, "a: It learnt < half.", "One seed."], runs=[part])
    text = render(page)
    assert text.count("It learnt &lt; half.") == text.count("One seed.") == 1
    assert text.count("12 % &lt; 20 %") == text.count("Healthy") == bool(verdict)
    assert ">2026-11-22 20:00:00 UTC<" in text


def test_hostile_text_stays_text(hostile):
    tree = Tree(hostile)
    own = [attributes for tag, attributes in tree.tags if tag == "script"]
    assert [attributes for attributes in own if attributes.get("type") != "application/json"] == [{}]
    assert tree.texts["b"] == [pages.HOSTILE[1], "Next:"] and "i" not in tree.texts
    for tag, attributes in tree.tags:
        assert not any(name.startswith("on") for name in attributes), f"{tag} {attributes}"
        places = [attributes[name] for name in ("src", "href") if name in attributes]
        assert all(place.startswith(("data:", "#")) for place in places), f"{tag} {attributes}"
    cells = tree.texts["td"] + tree.texts["th"]
    for text in pages.HOSTILE[:-1]:
        assert text in cells, text
    assert "\\udcff.png" in cells  # a file name that is no UTF-8 is shown as Python writes it
    assert tree.texts["title"] == [f"{pages.HOSTILE[0]} – patchloom"]
    assert "{{ 7 * 7 }}" in hostile and "49 ${" not in hostile


def test_json_cannot_leave_its_script(hostile):
    value = ["</script>", "<!--", "\u2028\u2029", "&amp;", "\udcff"]
    template = _templates().from_string("{{ value|tojson }}")
    written = template.render(value=value)
    assert json.loads(written) == value
    assert written.isascii() and not set(written) & set("<>&")
    with pytest.raises(ValueError):
        template.render(value=math.nan)
    chart, _, _, cloud = data_of(hostile)
    assert [line["name"] for line in chart["lines"]] == cloud["names"] == cloud["classes"] == pages.HOSTILE


def test_nothing_is_asked_of_another_machine(every):
    for name, page in every.items():
        text = render(page)
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'" and rules["img-src"] == rules["media-src"] == "data:", name
        assert not re.search(r"@import|url\((?!#)", re.sub(r"<main.*</main>", "", text, flags=re.DOTALL)), name
        tags = [tag for tag, _ in Tree(text).tags]
        assert sum(tags.count(tag) for tag in ("iframe", "object", "embed", "form", "base")) <= 1, name


def test_programs_write_text_only_as_text():
    forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|fetch\(|</script"
    for name in OURS:
        assert not re.search(forbidden, files("patchloom.report").joinpath("templates", name).read_text("utf-8"))


def test_overhead_and_that_no_picture_is_there_twice():
    page = pages.one_run()
    text, (part,) = render(page), page.runs
    uris = [part.cloud.sprite, *(picture.uri for picture in part.pictures), part.recordings[0].sound]
    uris += [part.sliders[0].truth.uri, part.sliders[0].answer.uri, part.recordings[0].picture.uri]
    assert [text.count(uri) for uri in uris] == [1] * len(uris)
    assert len(text.encode()) - sum(map(len, uris)) < 100_000
    assert len(render(Page("empty", "2026-11-22", "0.1.0")).encode()) < 60_000


def test_points_that_are_not_finite_are_holes():
    chart = Panel("loss", "", [Line("a", [1, 2, math.inf], [0.5, math.nan, 1]), Line("b", [2, 3], [0.25, -math.inf])])
    first, second = (line["points"] for line in chart_data(chart, line_numbers([chart]))["lines"])
    assert first == [[1, 0.5], [2, None]] and second == [[2, 0.25], [3, None]]
    assert chart_rows(chart) == [["1", "0.5", ""], ["2", "", "0.25"], ["3", "", ""]]


def test_a_run_has_one_colour_in_all_charts():
    lines = {name: Line(name, [0, 1], [0, 1], dashed=name == "chance") for name in ("mae", "mp3", "chance")}
    charts = [Panel("loss", "", [lines["mae"], lines["mp3"]]), Panel("accuracy", "", [lines["chance"], lines["mp3"]])]
    numbers = line_numbers(charts)
    assert [line["number"] for line in chart_data(charts[0], numbers)["lines"]] == [0, 1]
    assert [line["number"] for line in chart_data(charts[1], numbers)["lines"]] == [0, 1]  # of baselines the first
    assert numbers == {("mae", False): 0, ("mp3", False): 1, ("chance", True): 0}
    # a baseline is drawn alike whichever runs it is of
    flat = {name: Line(name, [0, 1], [0.1, 0.1], dashed=True, kind=name[:-3]) for name in ("untrained, a", "chance, a")}
    numbers = line_numbers([Panel("a", "", [*flat.values()]), Panel("b", "", [lines["chance"]])])
    assert numbers["chance, a", True] == numbers["chance", True] != numbers["untrained, a", True]


def test_a_long_curve_as_a_table_keeps_its_ends():
    x = list(range(10_000))
    rows = chart_rows(Panel("accuracy", "", [Line("a", x, [one / 10_000 for one in x])], True))
    assert len(rows) == 200 and rows[0] == ["0", "0.0 %"] and rows[-1] == ["9999", "100.0 %"]
    assert len({row[0] for row in rows}) == 200


def test_bars_go_from_zero_to_a_hundred_percent_on_each_card():
    beside = [value("untrained", 0.1, reach=0.02), value("raw", 0.05)]
    knn = Number("kNN", value("", 0.3, reach=0.05), beside)
    error = Number("patch error", value("", 0.412, ""), [value("mean colour", 1.0, "")])
    rank = Number("rank", value("", 87.0, ""), [value("chance", 0.12)])
    first, second, third = bars([knn, error, rank])
    assert [row["bar"] for row in first] == [30, 10, 5]
    assert [row["reach"] for row in first] == [[25, 35], [8, 12], None]
    assert [row["value"] for row in first] == ["30.0 %", "10.0 % [8.0, 12.0]", "5.0 %"]
    assert [row["bar"] for row in second + third] == [None] * 4
    assert bars([error, knn])[1] == first  # an error beside it takes nothing from a card
    (low,) = bars([Number("position accuracy", value("", 0.01703), [value("chance", 0.017)])])
    assert [row["bar"] for row in low] == [1.7, 1.7]
    text = render(Page("a", "2026-11-22", "0.1.0", runs=[RunPart("a", "finished", numbers=[error, knn])]))
    assert text.count('class="track"') == 3 and "width:30.0%" in text and "Bars range from 0 to 100 %." in text
    text = render(Page("a", "2026-11-22", "0.1.0", runs=[RunPart("a", "finished", numbers=[error, rank])]))
    assert 'class="track"' not in text and "Bars range" not in text


def test_columns_of_numbers_stand_on_the_right_and_are_not_broken():
    assert numeric_columns(Table("", ["run", "why"], [["a", "2 of its 12 layers are not trained"]])) == [False, False]
    rows = [["a", "1.5 %", "[1, 2]", "12 of 20", "+0.3"], ["b", "–", "[2, 3]", "", "−0.1"], ["c"]]
    found = numeric_columns(Table("", ["run", "kNN", "interval", "rank", "gain"], rows))
    assert found == [False, True, False, True, True]
    assert numeric_columns(Table("", ["run", "x"], [])) == [False, False]
    assert all(map(FIGURES.fullmatch, ("97.5 % (95.0-100.0)", "[48.9, 52.5]", "+0.3", "2026-11-22")))
    assert not any(map(FIGURES.fullmatch, ("", "–", "12 of 20 layers", "x" * 10, "1 " * 30)))
    text = render(Page("a", "2026-11-22", "0.1.0", tables=[Table("", ["a", "b"], [["a", "[1, 2]"], ["b", "no"]])]))
    assert '<td class="figures">[1, 2]</td>' in text and "<td>no</td>" in text
