import os

import pytest
from refusing import refused

from patchloom.data.near_duplicates import grouping_columns, subject_note
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import features

IMAGES = [f"in/{i}.png" for i in range(6)]


@pytest.fixture
def table(tmp_path, draw):
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


SPLITS = ["test" if i > 3 else "train" for i in range(6)]
SPLIT_FIRST = [",".join(cells) for cells in zip(SPLITS, "ababab", IMAGES, strict=True)]
REFUSED = {
    "no header": (rows("aabbab", "xxxxxx"), "", "3 columns.*@path=1,label=2, or add a header"),
    "split first": (SPLIT_FIRST, "", "@path=3,label=2, or add a header"),
    "many columns": (rows(*[["x"] * 6] * 6), "", "does not name its 7 columns"),
    "two paths": (
        ["left,right", *rows(reversed(IMAGES))],
        "",
        "left and right, and each could be.*@path=left",
    ),
    "two usual paths": (["image,filename", *rows(IMAGES)], "", "image and filename, and each could be the path"),
    "two labels": (["path,label,class", *rows("010101", "aabbab")], "", "label and class, and each could be the label"),
    "class of the test": (["path,label,split", *rows("abaacc", SPLITS)], "", "class c in test"),
    "test alone": (["path,split", *rows(["", "test"] * 3)], "", "none of train"),
    "strange split": (["path,split", *rows(["train", "holdout"] * 3)], "", "the split holdout"),
    "no path": (["id,species", "1,cat", "2,dog"], "", "none is called path.*m.csv@path=COLUMN"),
    "no files": (["id,species", "1,cat"], "@path=id", "none of the 1 files.*first is 1"),
    "missing files": (["path,label", "gone.png,a", "away.png,b"], "", "none of the 2 files.*first is gone.png"),
    "one name twice": (["path,x,x", *rows("aabbab", "aabbab")], "", "two columns called 'x'"),
    "no such column": (["path,label", *rows("aabbab")], "@label=kind", "has no column kind: it has path, label"),
    "no such role": (["path,label", *rows("aabbab")], "@kind=label", "path, label, split, group"),
    "a long row": (["path,label", *rows("aabbab"), "in/0.png,a,b"], "", "3 cells in a row and 2 in its first"),
    "no rows": (["path,label"], "", "lists no images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tables_are_refused_in_one_sentence(table, case):
    lines, chosen, word = REFUSED[case]
    refused(table(*lines) + chosen, word)


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


def test_without_a_header_images_identify_the_columns(table, tmp_path):
    for lines in (rows("aabbab"), [f"{label},{name}" for name, label in zip(IMAGES, "aabbab", strict=True)]):
        train = open_data(table(*lines)).train
        assert names(train, tmp_path) == IMAGES and train.labels.tolist() == [0, 0, 1, 1, 0, 1]
    for lines in (["image", *IMAGES], IMAGES, ["path,label", *(f"{tmp_path / name},a,," for name in IMAGES)]):
        assert names(open_data(table(*lines)).train, tmp_path) == IMAGES


def test_the_column_of_paths_is_the_one_with_files(table, tmp_path):
    train = open_data(table("frame,left", *rows("abcdef"))).train
    assert names(train, tmp_path) == IMAGES and train.labels is None and train.column("left")[2] == "c"
    two = table("left,right", *rows(reversed(IMAGES)))
    assert names(open_data(f"{two}@path=right").train, tmp_path) == IMAGES[::-1]
    path = table("image,filename", *(f"{i}.jpg,{name}" for i, name in enumerate(IMAGES)))
    assert names(open_data(f"{path}@path=filename").train, tmp_path) == IMAGES


def test_labels_by_word_or_number(table):
    words = open_data(table("path,id,class", *rows("010101", ["dog", "cat"] * 3))).train
    assert words.classes == ("cat", "dog") and words.labels.tolist() == [1, 0] * 3
    assert open_data(table("path,label,class", *rows("010101", "aabbab")) + "@label=class").train.labels.sum() == 3
    numbers = open_data(table("path,label", *rows(["10", "9", "10", "9", "2", "2"]))).train
    assert numbers.classes == ("2", "9", "10") and numbers.labels.tolist() == [2, 1, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        ([f"0.{i:02}" for i in range(12)], "12 of the 12 numbers in label occur once"),
        (["a", "nan", "b"] * 4, "label nan is a class like others"),
        (["0", "1"] * 6, ""),
        ([f"word {i}" for i in range(12)], ""),
    ],
)
def test_notes_on_labels_that_are_measurements_or_missing_values(table, draw, labels, note):
    for i in range(12):
        draw(f"{i}.png")
    _, *notes = open_data(table("path,label", *[f"{i}.png,{label}" for i, label in enumerate(labels)])).notes
    assert len(notes) == bool(note) and note in " ".join(notes)


def test_a_column_of_patients_is_noted(table):
    path = table("path,Patient_ID,day", *rows("112233", "ababab"))
    said = subject_note(open_data(path).train)
    assert said == subject_note(open_data(path).train.subset(range(6)))
    assert "3 values for 6 images" in said and "--group Patient_ID" in said
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
    assert grouping_columns({"lot": [f"{i // 3}" for i in range(24)], "box": values}) == ("lot", "box")  # 8, 6 values
    for i in range(24):
        draw(f"{i}.png")
    path = table("path,label,module", *[f"{i}.png,{'ab'[i % 2]},{i // 4}" for i in range(24)])
    said = subject_note(open_data(path).train)
    assert "6 values for 24 images: if" in said and "--group module" in said
    assert not subject_note(open_data(path, group="module").train)


def test_splits(table, tmp_path):
    split = ["train", "Training", "test", "val", "", "train"]
    data = open_data(table("path,label,split", *rows("aaabba", split)))
    assert names(data.train, tmp_path) == [IMAGES[i] for i in (0, 1, 5)] and data.train.classes == ("a",)
    data = open_data(table("path,label,split", *rows("ababab", split)))
    assert names(data.test, tmp_path) == [IMAGES[2]] and data.test.labels.tolist() == [0]
    assert ["1 row " in note and "neither" in note for note in data.notes] == [False, True, True]
    assert names(data.others["val"], tmp_path) == [IMAGES[3]] and data.others.keys() == {"val"}
    assert data.others["val"].labels.tolist() == [1]
    assert len(open_data(table("path,split", *rows(["Training"] * 6))).train) == 6
    strange = open_data(table("path,label,split", *rows("aaacaa", split))).others["val"]
    assert strange.labels.tolist() == [-1]  # of a class that is not trained on
    alone = open_data(table("path,split", *rows(["test"] * 6)))
    assert len(alone.train) == 6 and "all rows are of the split test" in alone.notes[-1]
    assert len(open_data(table("path,split", *rows(["train", "holdout"] * 3)) + "@split=").train) == 6
    assert len(open_data(table("path,set", *rows(["small", "large"] * 3))).train) == 6
    first = open_data(table("split,label,path", *SPLIT_FIRST))
    assert len(first.train) == 4 and len(first.test) == 2 and first.train.classes == ("a", "b")


def test_rows_that_cannot_be_used_are_counted_and_named(table, tmp_path):
    lines = ["path,label", *rows("aabbab"), "gone.png,a", "in/../in/0.png,a", ",b"]
    data = open_data(table(*lines))
    assert names(data.train, tmp_path) == IMAGES and data.train.labels.tolist() == [0, 0, 1, 1, 0, 1]
    said = " ".join(data.notes)
    assert "1 of 9 listed files do not exist (gone.png)" in said
    assert "1 of 9 rows are left out, since their file" in said and "since they have no path" in said
    (tmp_path / "else").mkdir()
    inside = rf"first is 0.png; {tmp_path}/in has such a file"  # inside, above or beside
    refused(table("path,label", "0.png,a"), inside)
    refused(table("path,label", "in/0.png,a", name="else/m.csv"), rf"; {tmp_path} has such a file")
    refused(table("path,label", "0.png,a", name="else/m.csv"), inside)


def test_a_plain_list_stays_one(table, tmp_path, draw):
    for name in ("in/with,comma.png", "my cat.png", "cat.png"):
        draw(name)
    data = open_data(table("# mine", "in/with,comma.png\tcat", *IMAGES, "gone.png", name="list.txt"))
    assert names(data.train, tmp_path) == ["in/with,comma.png", *IMAGES, "gone.png"]
    assert data.train.classes == ("cat",)
    assert "1 of 8 listed files do not exist (gone.png)" in data.notes[0] and len(data.notes) == 1
    for lines, classes in (
        (("gone\tcat", f"{IMAGES[0]}\tdog"), ("cat", "dog")),  # no header, though it may seem so
        (("my cat.png\tbig cat", f"{IMAGES[0]}\tdog"), ("big cat", "dog")),  # spaces are no columns
        (("my cat.png", IMAGES[0]), ()),
    ):
        train = open_data(table(*lines, name="list.tsv")).train
        assert len(train) == 2 and train.classes == classes
    refused(table(*IMAGES, name="list.txt") + "@path=x", "plain list, which has no columns")


def test_a_column_called_group_and_any_other_by_name(table):
    path = table("path,group,day", *rows(["a", "a", "b", "b", "", "c"], "112233"))
    assert open_data(path).train.groups.tolist() == [1, 1, 2, 2, 0, 3]
    assert open_data(path, group="day").train.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert open_data(f"{path}@group=day").train.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert open_data(f"{path}@group=").train.groups is None


def test_advice_names_columns(table):
    path = table("image,right,day", *rows(IMAGES, "aabbcc"))
    refused(path, r"--group dya matches no .*\(right, day\)", group="dya")
    for name, asked in ((path, "@"), (f"{path}@path=right", "@path=right,"), (f"{path}@label=", "@")):
        with pytest.raises(PatchloomError, match=f"has no labels: .*, {path}{asked}label=COLUMN$"):
            features.only_labelled(open_data(name).train.subset([0, 1]))


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
def test_cells_with_spaces_or_tabs_between_them(table, draw, suffix, gap):
    """The list of a public set of solar cells: images/cell0001.png  1.0  mono."""
    cells = [(f"images/cell{i}.png", "1.0" if i % 3 else "0.0", "mono" if i % 2 else "poly") for i in range(6)]
    for path, _, _ in cells:
        draw(path)
    lines, name = [gap.join(row) for row in cells], f"labels.{suffix}"
    refused(table(*lines, name=name), "3 columns .*cell0.png, 0.0, poly.*labels.*@path=1,label=2, or add a header")
    for head, chosen in (
        (f"path{gap}label{gap}other", ""),
        (f"file{gap}label{gap}kind", ""),
        (None, "@path=1,label=2"),
    ):
        train = open_data(table(*([head] if head else []), *lines, name=name) + chosen).train
        assert train.classes == ("0.0", "1.0") and train.labels.tolist() == [0, 1, 1, 0, 1, 1]
    assert open_data(table(*lines, name=name) + "@path=1,label=3").train.labels.tolist() == [1, 0, 1, 0, 1, 0]
    two = open_data(table(*(gap.join(row[:2]) for row in cells), name=name)).train
    assert two.labels.tolist() == [0, 1, 1, 0, 1, 1]


def test_a_file_listed_twice_with_another_label(table, draw):
    for name in "123":
        draw(f"{name}.png")
    cells = [
        ("1.png", "cat"),
        ("2.png", "dog"),
        ("1.png", "dog"),
        ("./2.png", "dog"),
        ("3.png", "cat"),
        ("1.png", "cow"),
    ]
    for lines in (["file,label", *map(",".join, cells)], map("\t".join, cells)):
        data = open_data(table(*lines))
        assert [data.train.classes[k] for k in data.train.labels] == ["cat", "dog", "cat"]
        (note,) = (note for note in data.notes if "listed before" in note)
        assert "3 of 6 rows are left out" in note and "1 of these files has another label" in note
        assert "(1.png: 'cat', then 'dog')" in note
    data = open_data(table("file,split", "1.png,train", "2.png,test", "1.png,test", "3.png,train"))
    assert len(data.train) == 2 and any("another split there" in note for note in data.notes)
