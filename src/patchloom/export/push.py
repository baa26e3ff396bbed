"""``--push NAME``: a folder that was written and compared goes to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its __all__

from patchloom.errors import PatchloomError
from patchloom.nets.online import why_offline


def check_push(name: str) -> None:
    """Refuse a push that would fail, before anything takes time.

    Args:
        name: of the repository.

    Raises:
        PatchloomError: it is no name of one, nobody is logged in, or the Hub does not answer.
    """
    try:
        validate_repo_id(name)
        if "/" not in name:  # the Hub would add whoever is logged in; the model card says the whole name already
            raise HFValidationError("it has no owner")
    except HFValidationError as problem:
        raise PatchloomError(
            f"--push {name} is no name on the Hub: give its owner and its own name, such as me/photos-mae, of letters, "
            "digits, '-', '_' and '.'"
        ) from problem
    if huggingface_hub.get_token() is None:
        raise PatchloomError(
            "--push needs a token of the Hub that may write: run hf auth login, or set HF_TOKEN; without --push the "
            "folder is written alone"
        )
    if offline := why_offline():
        raise PatchloomError(f"--push cannot reach the Hub ({offline}): leave it out, and upload the folder later")


def push(folder: Path, files: Sequence[str], name: str, public: bool) -> str:
    """Upload files of a folder to a repository, which is made if it is not there.

    Args:
        folder: with the files.
        files: what of it is uploaded, by name.
        name: of the repository.
        public: whether whoever wants may see one that is made; one that is there stays what it is.

    Returns:
        Its address.

    Raises:
        PatchloomError: the Hub refuses it, or the network fails.
    """
    api = huggingface_hub.HfApi()
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="Encoder exported by patchloom",
        )
    except Exception as problem:  # the Hub and the network fail in many ways, and every one means: nothing was uploaded
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise PatchloomError(
            f"{folder} is written, but was not uploaded to {name} ({first}): mend that, and give the command once more"
        ) from problem
    return str(made)
