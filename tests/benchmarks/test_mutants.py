"""Mutations of the source: each kind by value, and the tests that a mutation meets."""

import ast

import mutants
import pytest

# what is computed, its kind, and what it becomes
CASES = [
    ("a < b", "operator", "(a <= b)"),
    ("a + b", "operator", "(a - b)"),
    ("a and b", "operator", "(a or b)"),
    ("not a", "operator", "a"),
    ("True", "constant", "False"),
    ("7", "constant", "8"),
    ("0.5", "constant", "1.0"),
    ("0.0", "constant", "1.0"),
    ("a[0]", "index", "a[1]"),
    ("a[-2]", "index", "a[-1]"),
    ("f(a, b, c)", "arguments", "f(b, a, c)"),
]


@pytest.mark.parametrize(("before", "kind", "after"), CASES)
def test_one_change_in_its_place(before, kind, after):
    """Columns are bytes, so a letter of two bytes stands before."""
    source = f"first = 'é', {before}\n"
    (one,) = (one for one in mutants.mutations("nets/a.py", source) if one.kind == kind)
    assert one.apply(source) == f"first = 'é', {after}\n" and one.package == "nets" in mutants.CORE


def test_statements_are_dropped_and_what_computes_nothing_is_left_alone():
    source = """'Words, 1.'
x: Literal[1]
@cache(2)
def f(a: Literal[3]) -> Literal[4]:
    a.b = c
    call(
        a
    )
    raise E(f"{5}", 6)
"""
    dropped = mutants.mutations("a.py", source)
    assert [(one.kind, one.line, one.end_line) for one in dropped] == [
        ("dropped statement", 5, 5),
        ("dropped statement", 6, 8),
        ("dropped statement", 9, 9),
    ]
    changed = dropped[1].apply(source)
    assert "call" not in changed and "    pass\n    raise" in changed and ast.parse(changed)


def test_half_of_those_drawn_lie_in_the_core_and_every_kind_is_among_them():
    drawn = mutants.draw(20, 0)
    assert sum(one.package in mutants.CORE for one in drawn) == 10 and len({one.kind for one in drawn}) == 5
    for one in drawn:
        ast.parse(one.apply((mutants.ROOT / "src" / "patchloom" / one.file).read_text()))


def test_tests_of_the_own_package_come_first_then_the_quickest_within_the_limit():
    mutation = mutants.Mutation("nets/build.py", 7, 0, 8, 1, "constant", "1", "2")

    def ran(seconds, *lines):
        return {"seconds": seconds, "lines": {"nets/build.py": list(lines)}}

    measured = {
        "tests/train/test_a.py": ran(1, 7),
        "tests/nets/test_other.py": ran(5, 1, 8),
        "tests/nets/test_build.py": ran(9, 7, 8),
        "tests/nets/test_elsewhere.py": ran(1, 6, 9),
        "tests/data/test_b.py": ran(0.5, 7),
    }
    own = ["tests/nets/test_build.py", "tests/nets/test_other.py"]
    quick = ["tests/data/test_b.py", "tests/train/test_a.py"]
    assert mutants.chosen(mutation, measured, 60) == own + quick
    assert mutants.chosen(mutation, measured, 15) == own + quick[:1]
    assert mutants.chosen(mutation, measured, 1) == own[:1], "one at least"
