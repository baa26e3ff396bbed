from __future__ import annotations

import os

import pytest

from patchloom.data.near_duplicates import grouping_columns, subject_note
from patchloom.data.sources.open import absolute_name, open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import features

IMAGES = [f"in/{i}.png" for i in range(6)]


@pytest.fixture
def table(tmp_path, draw):
    """Write a table beside six images, and return its path."""
    for name in IMAGES:
        draw(name)

    def write(*lines: str, name: str = "m.csv", encoding: str = "utf-8") -> str:
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding=encoding)
        return str(tmp_path / name)

    return write


def rows(*columns):
    return [",".join(cells) for cells in zip(IMAGES, *columns, strict=True)]


def names(source, tmp_path):
    return [os.path.relpath(source.describe(i), tmp_path) for i in range(len(source))]


def refused(data, match, **options):
    with pytest.raises(PatchloomError, match=match) as caught:
        open_data(data, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", ["path", "file", "image", "filename", "File Name", "image_path", "img"])
def test_a_header_names_the_paths(table, tmp_path, column):
    data = open_data(table(f"id,{column},class", *(f"{i},{name},{'ab'[i % 2]}" for i, name in enumerate(IMAGES))))
    assert names(data.train, tmp_path) == IMAGES and data.test is None
    assert data.train.classes == ("a", "b") and data.train.labels.tolist() == [0, 1] * 3
    assert len(data.notes) == 1 and "other columns: id" in data.notes[0]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # spreadsheets write a mark at the beginning
def test_delimiters_and_quotes(table, tmp_path, delimiter, encoding):
    (tmp_path / IMAGES[0]).rename(tmp_path / "in" / "a, b;c.png")
    cells = [['"in/a, b;c.png"', "cat"], *([name, ""] for name in IMAGES[1:])]
    path = table(delimiter.join(["path", "label"]), *map(delimiter.join, cells), encoding=encoding)
    train = open_data(path).train
    assert names(train, tmp_path) == ["in/a, b;c.png", *IMAGES[1:]]
    assert train.classes == ("cat",) and train.labels.tolist() == [0, -1, -1, -1, -1, -1]


def test_one_column_with_and_without_a_header(table, tmp_path):
    assert names(open_data(table("image", *IMAGES)).train, tmp_path) == IMAGES
    assert names(open_data(table(*IMAGES)).train, tmp_path) == IMAGES


def test_without_a_header_images_identify_the_columns(table, tmp_path):
    for lines in (rows("aabbab"), [f"{label},{name}" for name, label in zip(IMAGES, "aabbab", strict=True)]):
        train = open_data(table(*lines)).train
        assert names(train, tmp_path) == IMAGES and train.labels.tolist() == [0, 0, 1, 1, 0, 1]
    refused(
        table(*rows("aabbab", "xxxxxx")),
        "m.csv does not name its 3 columns: .*@path=1,label=2, or add a header line such as 'path,label,other'$",
    )


def test_a_column_of_images_with_a_strange_name_is_found_and_two_are_not_guessed(table, tmp_path):
    train = open_data(table("frame,left", *rows("abcdef"))).train
    assert names(train, tmp_path) == IMAGES and train.labels is None and train.column("left")[2] == "c"
    two = table("left,right", *rows(reversed(IMAGES)))
    refused(two, "columns left and right, and each could be the path: choose one, as .*m.csv@path=left")
    assert names(open_data(f"{two}@path=right").train, tmp_path) == IMAGES[::-1]


def test_of_two_usual_names_the_one_whose_files_exist(table, tmp_path):
    path = table("image,filename", *(f"{i}.jpg,{name}" for i, name in enumerate(IMAGES)))
    assert names(open_data(path).train, tmp_path) == IMAGES
    refused(table("image,filename", *rows(IMAGES)), "image and filename, and each could be the path")


def test_labels_by_word_or_number(table):
    same = open_data(table("path,label,class", *rows("010101", ["dog", "cat"] * 3))).train
    assert same.classes == ("cat", "dog") and same.labels.tolist() == [1, 0] * 3
    refused(table("path,label,class", *rows("010101", "aabbab")), "label and class, and each could be the label")
    assert open_data(table("path,label,class", *rows("010101", "aabbab")) + "@label=class").train.labels.sum() == 3
    numbers = open_data(table("path,label", *rows(["10", "9", "10", "9", "2", "2"]))).train
    assert numbers.classes == ("2", "9", "10") and numbers.labels.tolist() == [2, 1, 2, 1, 0, 0]


def test_a_missing_value_that_was_written_as_a_word_is_noted(table):
    data = open_data(table("path,label", *rows(["a", "nan", "b", "a", "b", "a"])))
    assert "nan" in data.train.classes and any("label nan is a class like others" in note for note in data.notes)


@pytest.mark.parametrize(
    ("labels", "noted"),
    [([f"0.{i:02}" for i in range(12)], True), (["0", "1"] * 6, False), ([f"word {i}" for i in range(12)], False)],
)
def test_numbers_as_labels_are_noted(table, draw, labels, noted):
    for i in range(12):
        draw(f"{i}.png")
    notes = open_data(table("path,label", *[f"{i}.png,{label}" for i, label in enumerate(labels)])).notes
    assert any("12 of the 12 numbers in label occur once, and each number is a class" in one for one in notes) == noted


def test_a_column_of_patients_is_noted(table):
    path = table("path,Patient_ID,day", *rows("112233", "ababab"))
    said = f"Patient_ID in {path} has 3 values for 6 images: --group Patient_ID keeps those of each in one split"
    assert subject_note(open_data(path).train) == subject_note(open_data(path).train.subset(range(6))) == said
    assert not subject_note(open_data(path, group="Patient_ID").train)
    assert not subject_note(open_data(f"{path}@label=Patient_ID").train)  # it is what is to be known
    alone = table("path,patient", *rows("123456"), name="alone.csv")  # each image has its own
    assert not subject_note(open_data(alone).train)


@pytest.mark.parametrize(
    ("column", "values", "noted"),
    [
        ("module", [f"{i // 4}" for i in range(24)], True),
        ("lot", [f"lot {i % 6}" for i in range(24)], True),
        ("type", ["mono", "poly"] * 12, False),  # classes, and no groups
        ("serial", [f"{i}" for i in range(24)], False),
        ("pair", [f"{i // 2}" for i in range(24)], False),
        ("score", [f"{i % 6 / 6:.3f}" for i in range(24)], False),  # a measurement
        ("machine", ["a"] * 16 + list("bcdefghi"), False),  # one value has most
        ("empty", [""] * 24, False),
    ],
)
def test_a_column_that_divides_the_images_is_proposed_as_groups(column, values, noted):
    assert grouping_columns({column: values}) == ((column,) if noted else ())


def test_a_column_with_a_known_name_comes_first_and_others_are_conditional(table, draw):
    values = [f"{i // 4}" for i in range(24)]
    assert grouping_columns({"module": values, "patient": list("ab" * 12)}) == ("patient", "module")
    for i in range(24):
        draw(f"{i}.png")
    path = table("path,label,module", *[f"{i}.png,{'ab'[i % 2]},{i // 4}" for i in range(24)])
    said = subject_note(open_data(path).train)
    assert "module in" in said and "6 values for 24 images: if images of one value belong together" in said
    assert "--group module keeps" in said and not subject_note(open_data(path, group="module").train)


def test_splits(table, tmp_path):
    split = ["train", "Training", "test", "val", "", "train"]
    data = open_data(table("path,label,split", *rows("aaabba", split)))
    assert names(data.train, tmp_path) == [IMAGES[i] for i in (0, 1, 5)] and data.train.classes == ("a",)
    refused(table("path,label,split", *rows("aabbaa", ["train", "train", "test", "test", "train", "train"])), "class b")
    data = open_data(table("path,label,split", *rows("ababab", split)))
    assert names(data.test, tmp_path) == [IMAGES[2]] and data.test.labels.tolist() == [0]
    assert [note.partition(": ")[2] for note in data.notes[1:]] == [
        "1 rows of the split val are neither trained on (train) nor the test (test)",
        "1 rows without a split are neither trained on (train) nor the test (test)",
    ]
    assert names(data.others["val"], tmp_path) == [IMAGES[3]] and data.others.keys() == {"val"}
    assert data.others["val"].labels.tolist() == [1]
    strange = open_data(table("path,label,split", *rows("aaacaa", split))).others["val"]
    assert strange.labels.tolist() == [-1]  # of a class that is not trained on
    alone = open_data(table("path,split", *rows(["test"] * 6)))
    assert len(alone.train) == 6 and "all rows are of the split test" in alone.notes[-1]
    for others in (["", "test"] * 3, ["val", "test"] * 3):
        refused(table("path,split", *rows(others)), "none of train")
    refused(table("path,split", *rows(["train", "holdout"] * 3)), "has the split holdout: write train, val or test")
    assert len(open_data(table("path,split", *rows(["train", "holdout"] * 3)) + "@split=").train) == 6
    assert len(open_data(table("path,set", *rows(["small", "large"] * 3))).train) == 6


def test_rows_that_cannot_be_used_are_counted_and_named(table, tmp_path):
    lines = ["path,label", *rows("aabbab"), "gone.png,a", "in/../in/0.png,a", ",b"]
    data = open_data(table(*lines))
    assert names(data.train, tmp_path) == IMAGES and data.train.labels.tolist() == [0, 0, 1, 1, 0, 1]
    said = " ".join(data.notes)
    assert "1 of 9 listed files do not exist (gone.png); they are left out" in said
    assert "1 of 9 rows are left out, since their file was listed before" in said
    assert "1 of 9 rows are left out, since they have no path" in said
    refused(
        table("path,label", "gone.png,a", "away.png,b"), "none of the 2 files listed in .* exists.*first is gone.png"
    )
    (tmp_path / "else").mkdir()
    said = rf"first is 0.png; {tmp_path}/in has such a file: move m.csv there"  # inside, above or beside
    refused(table("path,label", "0.png,a"), said)
    refused(table("path,label", "in/0.png,a", name="else/m.csv"), rf"; {tmp_path} has such a file")
    refused(table("path,label", "0.png,a", name="else/m.csv"), said)
    refused(table("path,label"), "lists no images: write a row for each")


def test_absolute_paths_and_long_rows(table, tmp_path):
    assert len(open_data(table("path,label", *(f"{tmp_path / name},a,," for name in IMAGES))).train) == 6
    refused(table("path,label", *rows("aabbab"), "in/0.png,a,b"), "has 3 cells in a row and 2 in its first")


def test_strange_headers(table):
    refused(table("id,species", "1,cat", "2,dog"), "columns id, species, and none is called path.*m.csv@path=COLUMN")
    refused(table("id,species", "1,cat") + "@path=id", "none of the 1 files.*first is 1")
    refused(table("path,x,x", *rows("aabbab", "aabbab")), "two columns called 'x'")
    refused(table("path,label", *rows("aabbab")) + "@label=kind", "has no column kind: it has path, label")
    refused(table("path,label", *rows("aabbab")) + "@kind=label", "after @, write path, label, split, group")
    refused(table(*IMAGES, name="list.txt") + "@path=x", "plain list, which has no columns")


def test_a_plain_list_stays_one(table, tmp_path, draw):
    draw("in/with,comma.png")
    data = open_data(table("# mine", "in/with,comma.png\tcat", *IMAGES, "gone.png", name="list.txt"))
    assert names(data.train, tmp_path) == ["in/with,comma.png", *IMAGES, "gone.png"]
    assert data.train.classes == ("cat",)
    assert "1 of 8 listed files do not exist (gone.png)" in data.notes[0] and len(data.notes) == 1
    train = open_data(
        table("gone\tcat", f"{IMAGES[0]}\tdog", name="list.tsv")
    ).train  # no header, though it may seem so
    assert len(train) == 2 and train.classes == ("cat", "dog")


def test_a_column_called_group_and_any_other_by_name(table):
    path = table("path,group,day", *rows(["a", "a", "b", "b", "", "c"], "112233"))
    assert open_data(path).train.groups.tolist() == [1, 1, 2, 2, 0, 3]
    assert open_data(path, group="day").train.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert open_data(f"{path}@group=day").train.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert open_data(f"{path}@group=").train.groups is None


def test_advice_names_columns(table):
    path = table("image,right,day", *rows(IMAGES, "aabbcc"))
    for name, asked in (
        (path, f"{path}@"),
        (f"{path}@path=right", f"{path}@path=right,"),
        (f"{path}@label=", f"{path}@"),
    ):
        with pytest.raises(
            PatchloomError, match=f"has no labels: name the column that holds them, {asked}label=COLUMN$"
        ):
            features.only_labelled(open_data(name).train.subset([0, 1]))
    with pytest.raises(PatchloomError, match=r"--group dya matches no .*: give a column \(right, day\), a regular"):
        open_data(path, group="dya")


def test_it_can_be_opened_from_anywhere(table, tmp_path, monkeypatch):
    table("left,right", *rows(IMAGES))
    monkeypatch.chdir(tmp_path)
    kept = [absolute_name("m.csv"), absolute_name("m.csv@path=left")]
    monkeypatch.chdir("/")
    assert kept == [str(tmp_path / "m.csv"), f"{tmp_path / 'm.csv'}@path=left"] and len(open_data(kept[1]).train) == 6


def test_backslashes_of_windows(table, draw, tmp_path):
    """Tables and plain lists that Windows wrote; a file whose name has one is still found."""
    (tmp_path / "odd\\name.png").write_bytes(draw("y.png").read_bytes())
    for text in ("file,label\na\\1.png,cat\nodd\\name.png,dog\n", "a\\1.png\tcat\nodd\\name.png\tdog\n"):
        draw("a/1.png")
        train = open_data(str(table(text))).train
        assert [train.place(i) for i in range(2)] == ["a/1.png", "odd\\name.png"]
        assert train.classes == ("cat", "dog") and train.read(0).shape == (3, 8, 10)


@pytest.mark.parametrize("suffix", ["csv", "txt"])
@pytest.mark.parametrize("gap", ["  ", " ", "\t", " \t "])
def test_cells_with_spaces_or_tabs_between_them(tmp_path, draw, suffix, gap):
    """The list of a public set of solar cells: images/cell0001.png  1.0  mono."""
    rows = [(f"images/cell{i}.png", "1.0" if i % 3 else "0.0", "mono" if i % 2 else "poly") for i in range(6)]
    for path, _, _ in rows:
        draw(path)
    file = tmp_path / f"labels.{suffix}"
    file.write_text("".join(f"{gap.join(row)}\n" for row in rows))
    names = "of 3 names with tabs between: path, label, other" if "\t" in gap else "such as 'path label other'"
    said = f"does not name its 3 columns: choose .*labels.*@path=1,label=2, or add a header line {names}$"
    with pytest.raises(PatchloomError, match=said):
        open_data(str(file))
    lines = file.read_text()
    file.write_text(f"path{gap}label{gap}other\n{lines}")  # what is advised works
    assert open_data(str(file)).train.classes == ("0.0", "1.0")
    file.write_text(lines)
    train = open_data(f"{file}@path=1,label=2").train
    assert train.classes == ("0.0", "1.0") and len(train) == 6
    assert open_data(f"{file}@path=1,label=3").train.labels.tolist() == [1, 0, 1, 0, 1, 0]
    file.write_text(f"file{gap}label{gap}kind\n" + file.read_text())
    assert open_data(str(file)).train.classes == ("0.0", "1.0")
    file.write_text("".join(f"{gap.join(row[:2])}\n" for row in rows))
    assert open_data(str(file)).train.labels.tolist() == [0, 1, 1, 0, 1, 1]


def test_paths_with_spaces_are_no_columns(tmp_path, draw):
    for name in ("my cat.png", "my dog.png", "cat.png"):
        draw(name)
    file = tmp_path / "list.txt"
    file.write_text("my cat.png\nmy dog.png\n")
    assert len(open_data(str(file)).train) == 2 and open_data(str(file)).train.labels is None
    file.write_text("my cat.png\tbig cat\nmy dog.png\tbig dog\n")
    assert open_data(str(file)).train.classes == ("big cat", "big dog")


def test_a_file_listed_twice_with_another_label(table, draw, tmp_path):
    for name in ("1.png", "2.png", "3.png"):
        draw(name)
    rows = [
        ("1.png", "cat"),
        ("2.png", "dog"),
        ("1.png", "dog"),
        ("./2.png", "dog"),
        ("3.png", "cat"),
        ("1.png", "cow"),
    ]
    for text in (
        "file,label\n" + "".join(map("{0[0]},{0[1]}\n".format, rows)),
        "".join(map("{0[0]}\t{0[1]}\n".format, rows)),
    ):
        data = open_data(str(table(text)))
        assert [data.train.classes[k] for k in data.train.labels] == ["cat", "dog", "cat"]
        (note,) = (note for note in data.notes if "listed before" in note)
        assert "3 of 6 rows are left out" in note
        assert "1 of these files has another label there, and the first one counts (1.png: 'cat', then 'dog')" in note
    data = open_data(str(table("file,split\n1.png,train\n2.png,test\n1.png,test\n3.png,train\n")))
    assert len(data.train) == 2 and any("another split there" in note for note in data.notes)


def test_an_advised_header_fits_the_cells(table):
    """The column of splits is called split, wherever it stands, and the one of images path."""
    rows = [f"{'test' if i > 3 else 'train'},{'ab'[i % 2]},{name}" for i, name in enumerate(IMAGES)]
    refused(table(*rows), "@path=3,label=2, or add a header line such as 'split,label,path'$")
    opened = open_data(table("split,label,path", *rows))
    assert len(opened.train) == 4 and len(opened.test) == 2 and opened.train.classes == ("a", "b")
    wide = [",".join([name, *"abcdef"]) for name in IMAGES]
    refused(table(*wide), "add a header line of 7 names, path and label among them$")
