"""Bibliographic facts: complete, well-formed, and the same in CITATION.cff."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from patchloom.evaluate.protocols.label_free import MEASURES
from patchloom.options.protocols import PROTOCOLS
from patchloom.recipes import recipe_named, recipe_names
from patchloom.report.papers import (
    PAPERS,
    RECIPE_PAPERS,
    bibliography,
    papers_of_encoder,
    papers_of_protocol,
    papers_of_task,
)
from patchloom.tasks import TASKS

ROOT = Path(__file__).parents[2]
OF_TASKS = [entry.papers for entry in TASKS.values()]


def test_every_task_and_every_recipe_has_its_papers_and_none_is_unused():
    assert [name for name, entry in TASKS.items() if not entry.papers] == ["mixture"]
    assert {recipe_named(name).paper.partition(" (")[0] for name in recipe_names()} == set(RECIPE_PAPERS)
    used = {key for keys in (*OF_TASKS, *(one.papers for one in PROTOCOLS.values())) for key in keys}
    used |= {*RECIPE_PAPERS.values(), *(one.paper for one in MEASURES.values() if one.paper)}
    assert used <= set(PAPERS)
    options = "dosovitskiy2021vit liu2021swin wightman2019timm loshchilov2019adamw cubuk2020randaugment hu2022lora"
    assert set(PAPERS) - used == {*options.split(), "xiao2018upernet", "he2017mask"}


def test_the_year_and_first_author_of_a_task_are_those_of_its_entry():
    for entry in TASKS.values():
        if len(entry.papers) == 1:
            paper, said = PAPERS[entry.papers[0]], entry.paper
            assert said.endswith(str(paper.year)) and (
                said.startswith(paper.authors[0].split(",")[0]) or "NEPA" in said
            )
    for name in recipe_names():  # such as "MAE (He et al., CVPR 2022)"
        said = recipe_named(name).paper
        paper = PAPERS[RECIPE_PAPERS[said.partition(" (")[0]]]
        assert paper.authors[0].partition(",")[0] in said
        assert not (found := re.search(r"arXiv (\d{4}\.\d{5})", said)) or found[1] == paper.arxiv
        assert not (found := re.search(r"(?:et al\.|[A-Z]{4}) (\d{4})\b", said)) or found[1] == str(paper.year)


def test_fields_are_well_formed():
    for key, paper in PAPERS.items():
        assert re.fullmatch(r"[a-z]+\d{4}[a-z0-9]+", key) and key.startswith(paper.authors[0].split(",")[0].lower())
        assert str(paper.year) in key and all(re.fullmatch(r"\S[^,;]+, \S[^,;]+", one) for one in paper.authors), key
        if paper.arxiv:
            assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv)
            assert 0 <= paper.year - 2000 - int(paper.arxiv[:2]) <= 2, key  # published after it was put there
        assert paper.title == paper.title.strip() and not paper.title.endswith(".")
    assert len({paper.title for paper in PAPERS.values()}) == len(PAPERS)


def test_bibtex_by_hand_and_without_letters_that_old_programs_cannot_read():
    assert PAPERS["wu2023extrema"].bibtex() == (
        "@article{wu2023extrema,\n"
        "  title = {{Extreme Masking for Learning Instance and Distributed Visual Representations}},\n"
        "  author = {Wu, Zhirong and Lai, Zihang and Sun, Xiao and Lin, Stephen},\n"
        "  year = {2023},\n"
        "  journal = {Transactions on Machine Learning Research (TMLR)},\n"
        "  eprint = {2206.04667},\n"
        "  archivePrefix = {arXiv},\n"
        "}"
    )
    text = bibliography([*PAPERS.values(), *PAPERS.values()])
    assert text.isascii() and text.count("{") == text.count("}")
    assert re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE) == ["patchloom", *PAPERS]
    odd = replace(PAPERS["he2017mask"], title="A & B at 50 %")
    assert r"{{A \& B at 50 \%}}" in odd.bibtex()


@pytest.mark.parametrize(
    ("found", "keys"),
    [
        (papers_of_task("mae", None), "he2022mae"),
        (papers_of_task("mae", "pixio-vit-b"), "he2022mae yang2025pixio"),
        (papers_of_task("latent", "ijepa-vit-h"), "assran2023ijepa"),
        (papers_of_task("latent", None), "assran2023ijepa baevski2023data2vec2 lowe2026bootleg"),
        (papers_of_task("mixture", None), ""),
        (papers_of_task("my.py:Mine#0", None), ""),
        (papers_of_encoder("swin_tiny_patch4_window7_224"), "liu2021swin wightman2019timm"),
        (papers_of_encoder("nano"), "dosovitskiy2021vit wightman2019timm"),
        (papers_of_protocol("segment", {"head": "linear"}), ""),
        (papers_of_protocol("segment", {"head": "upernet"}), "xiao2018upernet"),
        (papers_of_protocol("detect", {"masks": True}), "li2022vitdet ren2015faster he2017mask"),
        (papers_of_protocol("label-free", {}, ["RankMe", "own crop 25 %", "DSE"]), "garrido2023rankme dai2025dse"),
    ],
)
def test_what_was_used(found, keys):
    assert [paper.key for paper in found] == keys.split()


def test_citation_cff_has_the_same_papers():
    make = runpy.run_path(str(ROOT / "docs" / "make_citation.py"))
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert text == make["citation"](text), "run python docs/make_citation.py"
    by_title = {one["title"]: one for one in yaml.safe_load(text)["references"]}
    of_tasks = {key for keys in OF_TASKS for key in keys} | set(RECIPE_PAPERS.values())
    assert set(by_title) == {PAPERS[key].title for key in of_tasks} and len(by_title) == 18
    mae = by_title["Masked Autoencoders Are Scalable Vision Learners"]
    assert mae["year"] == 2022 and mae["authors"][4] == {"family-names": "Dollár", "given-names": "Piotr"}
    assert (
        mae["identifiers"] == [{"type": "other", "value": "arXiv:2111.06377"}] and "CVPR" in mae["conference"]["name"]
    )
