"""Display of results: tables that fit the terminal, and escaped HTML in a notebook."""

import pytest

from patchloom.display import (
    Displayable,
    Lines,
    TextTable,
    Verbatim,
    duration,
    print_line,
    time_left,
    truncate_middle,
    visible,
)

TABLE = TextTable(
    ("encoder", "k", "a heading of words", "text"),
    (
        ("a/very/long/name/of/an/encoder", "1", "61.2 % [59.0, 63.3]", "words that may be broken between them"),
        ("short", "20", "5.0 %\n[4.0, 6.0]", "few"),
        ("a title over all columns, however narrow these are",),
    ),
    names=frozenset({0}),
    texts=frozenset({3}),
    ends=frozenset({0}),
)


class Result(Displayable):
    def parts(self, width: int) -> list[str | TextTable]:
        sentence = "Of these, 61.2 % [59.0, 63.3] against 50.0 % [47.9, 52.1] are right, and so are those."
        return [sentence, Verbatim("Picture: /a/path/with spaces/that is not to be broken/anywhere.png"), "", TABLE]


@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_it_fits_and_breaks_neither_numbers_nor_intervals(width: int) -> None:
    lines = TABLE.text(width).split("\n")
    assert max(map(len, lines)) <= width and any("61.2 % [59.0, 63.3]" in line for line in lines)
    assert set(lines[1]) <= {"─"} or set(lines[2]) <= {"─"}
    sentence = Result().text(width).split("Picture")[0].split("\n")
    for whole in ("61.2 %", "[59.0, 63.3]", "50.0 %", "[47.9, 52.1]"):
        assert any(whole in line for line in sentence)
    assert "Picture: /a/path/with spaces/that is not to be broken/anywhere.png" in Result().text(width).split("\n")


def test_text_columns_shrink_before_names() -> None:
    wide, narrow = TABLE.text(200), TABLE.text(64)
    assert "a/very/long/name/of/an/encoder" in wide and "words that may be broken between them" in wide
    assert "a/very" in narrow and "encoder" in narrow and "…" in narrow and "words that may\n" not in wide
    assert truncate_middle("abcdefghij", 5) == "ab…ij" and truncate_middle("abc", 5) == "abc"
    assert TABLE.least() == max(map(len, TABLE.text(0).split("\n")[:5]))
    # the line between two groups of rows
    assert "\n\nshort" in wide


def test_a_notebook_gets_tables_and_nothing_that_would_be_markup() -> None:
    class Named(Displayable):
        def parts(self, width: int) -> list[str | TextTable]:
            return ["<script>alert(1)</script>", TextTable(("a&b",), ((Lines("<b>x</b>\ny"),), ("z",)))]

    html = Named()._repr_html_()
    assert "<script>" not in html and "<b>" not in html and "&lt;script&gt;" in html
    assert html.count("<table>") == 1 and "<th>a&amp;b</th>" in html and "<td>&lt;b&gt;x&lt;/b&gt;<br>y</td>" in html
    assert "a/very/long/name/of/an/encoder" in Result()._repr_html_()


def test_at_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert repr(Result()) == str(Result()) == Result().text(80) != Result().text(60)


HIDDEN = "a\x1b]0;b\x07\x9b31m\u202ec\nd\re\x7f\u2028f\udc9bg"
SHOWN = r"a\x1b]0;b\x07\x9b31m\u202ec\nd\re\x7f\u2028f\udc9bg"


def test_control_characters_are_written_out(capsys):
    class Named(Displayable):
        refusal = HIDDEN

        def parts(self, width: int) -> list[str | TextTable]:
            return [HIDDEN, Verbatim(HIDDEN), TextTable((HIDDEN,), ((HIDDEN,), (Lines("1\n2"),)))]

    assert visible(HIDDEN) == SHOWN == visible(SHOWN)
    assert visible("é 日本 \N{ZERO WIDTH JOINER} −") == "é 日本 \N{ZERO WIDTH JOINER} −", "letters stay"
    assert visible(Lines("a\nb\x1b")) == "a\nb\\x1b"
    print_line(HIDDEN)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    text = str(Named())
    assert text.count(SHOWN) == 5 and visible(Lines(text)) == text
    assert text.splitlines()[-3:] == ["1", "2", SHOWN]


def test_durations():
    written = {59.4: "59 s", 60: "1 min 0 s", 3599.4: "59 min 59 s", 3600: "1 h 0 min", 172_799: "47 h 59 min"}
    written |= {172_800: "2 days", 10**8: "1,157 days"}
    assert {seconds: duration(seconds) for seconds in written} == written
    assert (time_left(None), time_left(61)) == ("time left unknown", "1 min 1 s left")
