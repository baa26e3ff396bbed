"""Help, error messages and a dry run of the command line, compared with transcript.txt, which people review.

After an intended change, write the transcript again, and read the difference:

    PATCHLOOM_WRITE_TRANSCRIPT=1 python -m pytest -q -n 0 tests/test_transcript.py; git diff tests/transcript.txt
"""

import os
import re
import shlex
from pathlib import Path

import pytest

from patchloom.cli import main

TRANSCRIPT = Path(__file__).with_name("transcript.txt")
SMALL = (
    "--img_size 16 --patch_size 4 --model.depth 2 --model.embed_dim 32 --model.num_heads 2 --batch_size 32 --epochs 1 "
    "--held_out 0.05 --threads 1 --workers 0 --device cpu --precision float32 --attention fused --kernels torch "
    "--compile false --blr 1e-3"
)
HELP = (
    *(
        "",
        "check",
        "pretrain",
        "pretrain --task droppos",
        "compare",
        "embed",
        "curate",
        "predict",
        "look",
        "look curves",
    ),
    *("report", "results", "export", "bench", "evaluate", "evaluate knn", "evaluate segment", "evaluate keywords"),
)
COMMANDS = (
    *(f"{verb} --help".strip() for verb in HELP),
    "tasks",
    "recipes",
    # refusals
    "pretrian digits",
    "pretrain",
    "pretrain nowhere",
    "pretrain digits --epoch 3",
    "pretrain digits --task maee",
    "pretrain digits --epochs many",
    "pretrain digits --img_size 96 --patch_size 7",
    "evaluate knm run digits",
    "evaluate knn nowhere digits",
    "look nowhere",
    "export nowhere",
    "report nowhere",
    "results nowhere",
    f"pretrain digits --task mae {SMALL} --dry-run",
)
NUMBER = re.compile(r"(?<![\w-])[-+±]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def plain(text: str, numbers: bool) -> str:
    """Return a text without the parts that differ from run to run."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text).replace(str(Path.cwd()), "DIR")
    if not numbers:
        text = NUMBER.sub("#", text)
        text = re.sub(r"(# (h|min|s|ms)\b ?)+", "# s ", text)
        text = re.sub(r"# [kMG]i?B\b", "# MB", text)
        text = re.sub(r" {2,}", "  ", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def test_the_command_line_prints_what_the_transcript_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    parts = []
    for command in COMMANDS:
        capsys.readouterr()
        try:
            code = main(shlex.split(command))
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        ran = "--dry-run" in command
        said = "\n".join(filter(None, (plain(text, not ran) for text in (out, err))))
        parts.append(f"$ patchloom {command.replace(SMALL, 'SMALL')}\n{said}\n[{code}]")
    found = "\n\n".join(parts) + "\n"
    if os.environ.get("PATCHLOOM_WRITE_TRANSCRIPT"):
        before = TRANSCRIPT.read_text("utf-8")
        TRANSCRIPT.write_text(found, "utf-8")
        changed = "as it was" if found == before else "changed: read git diff tests/transcript.txt"
        with capsys.disabled():
            print(f"\nwrote {TRANSCRIPT}, {changed}")
        pytest.skip("the transcript is written, and not compared")
    for now, before in zip(parts, TRANSCRIPT.read_text("utf-8").rstrip("\n").split("\n\n$ "), strict=True):
        assert now.removeprefix("$ ") == before.removeprefix("$ ")
