"""Releases: the version is the tag, the same wherever it is read; wheel and sdist hold the files in git."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchloom.version import UNRELEASED, version_in

ROOT = Path(__file__).parents[1]
NAMED = ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", ".gitignore")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder: Path, *words: str) -> None:
    someone = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "tag.gpgsign=false", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *someone, *words], cwd=folder, check=True, capture_output=True)


def built(folder: Path) -> str:
    """Return the version of a build in a folder."""
    command = [sys.executable, "-m", "hatchling", "metadata", "version"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """A folder with the files that a build needs, without git."""
    (tmp_path / ".ci").mkdir()
    for name in (*NAMED, ".ci/release"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def repository(tree):
    """The same folder as a repository with one commit."""
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "one")
    return tree


def released(repository: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", ".ci/release"], cwd=repository, capture_output=True, text=True)


def test_the_next_version_is_the_same_everywhere():
    found = [
        re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1]
        for name, pattern in (
            ("pyproject.toml", r'^fallback-version = "(.+?)\.dev0"'),
            ("CITATION.cff", r"^version: (.+)"),
        )
    ]
    assert [f"{one}.dev0" for one in found] == [UNRELEASED] * 2


def test_without_git_it_is_the_next_version(tree):
    assert built(tree) == UNRELEASED


@needs_git
def test_a_tag_is_the_version_and_another_tag_is_none(repository):
    assert re.fullmatch(re.escape(UNRELEASED[:-1]) + r"1\+g\w+", built(repository))  # a clone without tags
    git(repository, "tag", "v3.2.1")
    assert built(repository) == "3.2.1"
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "two")
    git(repository, "tag", "measured-2026")
    assert re.fullmatch(r"3\.2\.2\.dev1\+g\w+", built(repository))


def test_an_installed_package_has_the_version_beside_it_and_no_other(tmp_path):
    assert version_in(tmp_path) == UNRELEASED
    for name, version in (("patchloom", "3.2.1"), ("another", "9")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    assert version_in(tmp_path) == "3.2.1"


def test_an_editable_installation_has_the_version_that_pip_shows(tmp_path):
    tree, others = tmp_path / "tree", tmp_path / "site"
    (tree / "src").mkdir(parents=True)
    (metadata := others / "patchloom-3.2.1.dist-info").mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: patchloom\nVersion: 3.2.1\n")
    origin = {"url": tree.as_uri(), "dir_info": {"editable": True}}
    for found, version in ((origin, "3.2.1"), (origin | {"url": others.as_uri()}, UNRELEASED), ([], UNRELEASED)):
        (metadata / "direct_url.json").write_text(json.dumps(found))
        assert version_in(tree / "src", [str(others)]) == version
    (metadata / "direct_url.json").unlink()
    assert version_in(tree / "src", [str(others)]) == UNRELEASED, "installed from elsewhere"


@needs_git
def test_only_a_tagged_commit_that_is_named_everywhere_is_released(repository):
    asked = released(repository)
    assert (asked.returncode, asked.stderr.splitlines()) == (
        2,
        ["this commit has no tag such as v0.1.0: git tag -a v0.1.0 makes one"],
    )
    git(repository, "tag", "v3.2.1")
    assert "CITATION.cff has another version" in released(repository).stderr
    cff = repository / "CITATION.cff"
    cff.write_text(re.sub(r"^version: .*", "version: 3.2.1", cff.read_text(), flags=re.MULTILINE))
    assert "not as it was committed" in released(repository).stderr
    git(repository, "commit", "--quiet", "--all", "--message", "two")
    git(repository, "tag", "--force", "v3.2.1")
    asked = released(repository)
    assert asked.returncode == 2 and "CHANGELOG.md has no heading ## 3.2.1" in asked.stderr


@pytest.mark.parametrize("has_git", [False, pytest.param(True, marks=needs_git)])
def test_the_files_of_a_tree_are_known_with_and_without_git(has_git, tmp_path):
    known = runpy.run_path(str(ROOT / ".ci" / "contents.py"))["known"]
    (tmp_path / "__pycache__").mkdir()
    for name in ("a.py", "__pycache__/a.pyc", ".gitignore"):
        (tmp_path / name).write_text("__pycache__/\n" if name == ".gitignore" else "")
    if has_git:
        git(tmp_path, "init", "--quiet")
        git(tmp_path, "add", "a.py")
    assert known(tmp_path) == {"a.py", ".gitignore"}


def test_missing_or_unexpected_files_in_a_wheel_or_sdist_are_reported():
    faults = runpy.run_path(str(ROOT / ".ci" / "contents.py"))["faults"]
    known = {"src/patchloom/a.py", "src/patchloom/b.yaml", "tests/test_a.py", "Dockerfile"}
    wheel = ["patchloom/a.py", "patchloom/b.yaml", "patchloom-1.dist-info/METADATA"]
    sdist = [*known, "PKG-INFO"]
    assert faults(wheel, sdist, known) == []
    assert faults(wheel[1:], sdist, known) == ["the wheel lacks src/patchloom/a.py"]
    assert faults([*wheel, "patchloom/c.py"], sdist, known) == ["the wheel has patchloom/c.py, which the tree has not"]
    assert faults([*wheel, "tests/test_a.py"], sdist, known) == ["the wheel has tests/test_a.py beside the package"]
    assert faults(wheel, [one for one in sdist if "b.yaml" not in one], known) == [
        "the sdist lacks src/patchloom/b.yaml"
    ]
    assert faults(wheel, [*sdist, "site/a.html"], known) == ["the sdist has site/a.html, which the tree has not"]
