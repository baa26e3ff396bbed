"""Methods paragraphs: the facts of a run, and what several runs share."""

from dataclasses import replace

import pytest

from patchloom.report.methods import Methods, merge, methods_of, paragraphs, references
from patchloom.report.page import render
from patchloom.report.report import page_of
from patchloom.report.results import rows_of
from patchloom.runs.past import RunData, load_run


@pytest.fixture(scope="module")
def loaded(finished) -> RunData:
    return load_run(finished)


def methods(run: RunData) -> Methods:
    return methods_of(run, rows_of(run.results, run.name, run.name))


def test_the_paragraph_has_the_numbers_and_the_names(loaded):
    first, last = paragraphs([methods(loaded)])
    s = loaded.settings
    peak = s.blr * s.batch_size / 256
    for said in (
        *("droppos (Wang et al., 2023)", "where each visible patch was", "48 different images", "12 others"),
        *(f"{s.epochs:g} epochs", f"{s.batch_size} images per update", f"{s.blr:g} per 256", f"peak {peak:.3g}"),
        *("(20 %)", "Seed 0", "cpu, float32, 1 thread", "by knn (Wu et al., 2018) on 12 test images", "untrained"),
    ):
        assert said in first, said
    assert "Wilson" in last and "patchloom" in last and "timm" in last
    keys = [
        line.partition("{")[2].rstrip(",") for line in references([methods(loaded)]).splitlines() if line[:1] == "@"
    ]
    assert keys[:2] == ["patchloom", "wang2023droppos"] and "wu2018instance" in keys and "hu2022lora" not in keys


@pytest.mark.parametrize(
    ("changes", "said", "key"),
    [
        ({"adapt": "lora", "init": "timm:vit_tiny"}, "began with the weights of timm:vit_tiny", "hu2022lora"),
        ({"randaugment": 9.0}, "RandAugment of magnitude 9 (Cubuk et al., 2020)", "cubuk2020randaugment"),
        ({"model": {"name": "swin_tiny_patch4_window7_224"}}, "a Swin Transformer, swin_tiny", "liu2021swin"),
        ({"recipe": "pixio-vit-b", "task": {"name": "mae"}}, "with the recipe pixio-vit-b", "yang2025pixio"),
        ({"halve_every": 100}, "halved every 100 updates", "wang2023droppos"),
        ({"task": {"name": "/a/my.py:Mine#00"}}, "by the task Mine", "wightman2019timm"),
        ({"held_out": 0.0}, "(0 %)", "wightman2019timm"),
    ],
)
def test_what_a_run_used_is_named_and_cited(loaded, changes, said, key):
    found = methods(replace(loaded, settings=replace(loaded.settings, **changes)))
    assert said in paragraphs([found])[0] and f"{{{key}," in references([found])


def test_an_unfinished_run_says_how_far_it_is(loaded):
    half = {"epoch": loaded.metrics["epoch"] / 2}
    found = methods(replace(loaded, summary=None, metrics=half, about={}, results=[]))
    (first, last) = paragraphs([found])
    assert f"1 of {loaded.settings.epochs:g} epochs so far" in first and "evaluated" not in first
    assert "Intervals" not in last


def test_runs_that_differ_in_their_seed_share_a_paragraph_and_others_do_not(loaded):
    def seeded(seed: int, **changes):
        settings = replace(loaded.settings, seed=seed, **changes)
        return methods(replace(loaded, name=f"run-{seed}", settings=settings, results=[]))

    found = merge([seeded(0), seeded(1), seeded(2, blr=0.5)])
    assert [one.names for one in found] == [("run-0", "run-1"), ("run-2",)]
    same, other, _ = paragraphs(found)
    assert same.startswith("run-0 and run-1: ") and "Seeds 0 and 1;" in same and other.startswith("run-2: ")


def test_the_page_ends_with_them(loaded):
    page = page_of([loaded.folder.path])
    text = render(page)
    assert page.bibtex in text.replace("&#39;", "'").replace("&amp;", "&")
    assert text.index('id="run-1-about"') < text.index('id="cite"') and 'href="#cite"' in text
    assert "Wilson" in text
