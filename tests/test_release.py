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
def repository(tmp_path):
    """A repository of the files that a build needs, with one commit."""
    (tmp_path / ".ci").mkdir()
    for name in (*NAMED, ".ci/release"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert built(tmp_path) == UNRELEASED, "without git it is the next version"
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "one"]):
        git(tmp_path, *words)
    return tmp_path


def test_the_next_version_is_the_same_everywhere():
    places = {"pyproject.toml": r'^fallback-version = "(.+?)\.dev0"', "CITATION.cff": r"^version: (.+)"}
    for name, pattern in places.items():
        assert re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1] + ".dev0" == UNRELEASED


@needs_git
def test_a_tag_is_the_version_and_another_tag_is_none(repository):
    assert re.fullmatch(re.escape(UNRELEASED[:-1]) + r"1\+g\w+", built(repository))  # a clone without tags
    git(repository, "tag", "v3.2.1")
    assert built(repository) == "3.2.1"
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "two")
    git(repository, "tag", "measured-2026")
    assert re.fullmatch(r"3\.2\.2\.dev1\+g\w+", built(repository))


def test_an_installed_package_has_the_version_beside_it_or_that_of_an_editable_installation(tmp_path):
    tree, others = tmp_path / "tree", tmp_path / "site"
    (tree / "src").mkdir(parents=True)
    assert version_in(tmp_path) == UNRELEASED
    for name, version in (("patchloom", "3.2.1"), ("another", "9")):
        (others / f"{name}-{version}.dist-info").mkdir(parents=True)
        (others / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    assert version_in(others) == "3.2.1"
    assert version_in(tree / "src", [str(others)]) == UNRELEASED, "installed from elsewhere"
    origin = {"url": tree.as_uri(), "dir_info": {"editable": True}}
    for found, version in ((origin, "3.2.1"), (origin | {"url": others.as_uri()}, UNRELEASED), ([], UNRELEASED)):
        (others / "patchloom-3.2.1.dist-info" / "direct_url.json").write_text(json.dumps(found))
        assert version_in(tree / "src", [str(others)]) == version


@needs_git
def test_only_a_tagged_commit_that_is_named_everywhere_is_released(repository):
    def refused() -> str:
        asked = subprocess.run(["bash", ".ci/release"], cwd=repository, capture_output=True, text=True)
        assert asked.returncode == 2
        return asked.stderr

    assert "this commit has no tag" in refused()
    git(repository, "tag", "v3.2.1")
    assert "CITATION.cff has another version" in refused()
    cff = repository / "CITATION.cff"
    cff.write_text(re.sub(r"^version: .*", "version: 3.2.1", cff.read_text(), flags=re.MULTILINE))
    assert "not as it was committed" in refused()
    git(repository, "commit", "--quiet", "--all", "--message", "two")
    git(repository, "tag", "--force", "v3.2.1")
    assert "CHANGELOG.md has no heading ## 3.2.1" in refused()


def test_missing_or_unexpected_files_in_a_wheel_or_sdist_are_reported():
    faults = runpy.run_path(str(ROOT / ".ci" / "contents.py"))["faults"]
    known = {"src/patchloom/a.py", "src/patchloom/b.yaml", "tests/test_a.py", "Dockerfile"}
    wheel, sdist = (
        ["patchloom/a.py", "patchloom/b.yaml", "patchloom-1.dist-info/METADATA"],
        [*sorted(known), "PKG-INFO"],
    )
    assert faults(wheel, sdist, known) == []
    for in_wheel, in_sdist, words in (
        (wheel[1:], sdist, "the wheel lacks src/patchloom/a.py"),
        ([*wheel, "patchloom/c.py"], sdist, "the wheel has patchloom/c.py"),
        ([*wheel, "tests/test_a.py"], sdist, "the wheel has tests/test_a.py"),
        (wheel, [one for one in sdist if one != "src/patchloom/b.yaml"], "the sdist lacks src/patchloom/b.yaml"),
        (wheel, [*sdist, "site/a.html"], "the sdist has site/a.html"),
    ):
        (fault,) = faults(in_wheel, in_sdist, known)
        assert fault.startswith(words)
