"""Tests of uploads to the Hub with an API that only records requests."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import RepoUrl

from patchloom.errors import PatchloomError
from patchloom.export import to_hub as pushing

FILES = ("config.json", "README.md")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """Fixture with the requests to the Hub, in order."""
    found: list[tuple[str, dict]] = []

    class Api:
        def create_repo(self, repo_id: str, **options) -> RepoUrl:
            found.append(("create", {"repo_id": repo_id, **options}))
            return RepoUrl(f"https://huggingface.co/somebody/{repo_id.rpartition('/')[2]}")

        def upload_folder(self, **options) -> None:
            there = {one.name for one in Path(options["folder_path"]).iterdir()}
            assert set(options["allow_patterns"]) <= there
            found.append(("upload", options))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*FILES, "notes.txt"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("public", [False, True])
def test_a_repository_is_made_and_filled(asked, folder, public):
    address = pushing.push(folder, FILES, "photos-mae", public)
    (first, made), (second, sent) = asked
    assert (first, second) == ("create", "upload") and made["private"] is not public and made["exist_ok"]
    # by the name that the Hub gave it
    assert sent["repo_id"] == "somebody/photos-mae" and sent["allow_patterns"] == [*FILES]
    assert address == "https://huggingface.co/somebody/photos-mae"


def test_what_the_hub_refuses_is_a_sentence(folder, monkeypatch):
    class Refusing:
        def create_repo(self, *_, **__):
            raise OSError("403 Forbidden: you may not write there\nand much more")

    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    with pytest.raises(
        PatchloomError, match=r"is written, but was not uploaded to a/b \(403 Forbidden: you may not wr"
    ):
        pushing.push(folder, FILES, "a/b", False)


def test_nothing_is_tried_that_would_fail(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    for name in ("a b", "photos-mae"):  # the second without its owner
        with pytest.raises(PatchloomError, match=f"--push {name} is not a repository name"):
            pushing.check_push(name)
    with pytest.raises(PatchloomError, match="needs a token of the Hub with write access: run hf auth login"):
        pushing.check_push("me/photos-mae")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_nothing")
    monkeypatch.setattr(pushing, "why_offline", lambda: "huggingface.co does not answer")
    with pytest.raises(PatchloomError, match=r"cannot reach the Hub \(huggingface.co does not answer\): leave it out"):
        pushing.check_push("me/photos-mae")
    monkeypatch.setattr(pushing, "why_offline", lambda: "")
    pushing.check_push("me/photos-mae")
