"""Random words on the command line and in configurations, and damaged files: a message or success, never a traceback.

Nothing is trained: `pretrain` ends after its task is built.
"""

import random
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labelled import write_noise
from typed import SMALL, configuration, other_verb, pretraining

from patchloom import cli
from patchloom.errors import PatchloomError
from patchloom.options import parse as options
from patchloom.runs.task import prepare_task
from patchloom.train import loop

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fuzz  # noqa: E402, found by the path above

FUZZ = settings(derandomize=True, database=None, suppress_health_check=list(HealthCheck))
each_number = pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.slow)])


# cached, because the options of a task do not change and take most of the time
SPEC = cache(options.pretrain_spec)


@pytest.fixture(autouse=True)
def untrained(monkeypatch, tmp_path):
    """End `pretrain` after the settings are resolved and the task is built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "pretrain_spec", SPEC)

    def planned(decide):
        plan = decide()
        prepare_task(plan.settings, plan.stats)
        raise SystemExit(0)

    def end(*_, **__):
        raise PatchloomError("the end")

    monkeypatch.setattr(loop, "launch", lambda *_: None)
    monkeypatch.setattr(loop, "first_decides", planned)
    monkeypatch.setattr("patchloom.bench.Step", end)
    monkeypatch.setattr(import_module("patchloom.check"), "propose", end)  # the module, not the function of its name
    write_noise(tmp_path / "images", 6)


def run_command(words: list[str], capfd) -> tuple[int, str]:
    """Return the exit code of the command line, and its message."""
    capfd.readouterr()
    try:
        code = cli.main(words)
    except SystemExit as end:  # --help
        code = end.code
    err = capfd.readouterr().err
    assert code in (0, None, 2), (words, err)
    if code == 2:
        assert err.startswith("patchloom: ") and err.count("\n") == 1 and err.endswith("\n"), (words, err)
    assert "Traceback" not in err and "patchloom: unexpected" not in err, (words, err)
    return code, err


@each_number
@pytest.mark.parametrize("strategy", [pretraining(), other_verb()], ids=["pretrain", "verbs"])
def test_random_words(strategy, examples, capfd):
    ends = set()

    @settings(FUZZ, max_examples=examples)
    @given(strategy)
    def check_one(words):
        ends.add(run_command(words, capfd)[0])

    check_one()
    assert {0, 2} <= ends, "words of all kinds were tried"


@each_number
def test_random_configurations(examples, tmp_path, capfd):
    file, ends = tmp_path / "run.yaml", set()

    @settings(FUZZ, max_examples=examples)
    @given(configuration, st.booleans())
    def check_one(content, alone):
        file.write_bytes(content)
        ends.add(run_command(["pretrain", *([] if alone else SMALL), "--config", str(file)], capfd)[0])

    check_one()
    assert {0, 2} <= ends


# errors found by the fuzz test, or by a sweep of every option over every word and number
FOUND = (
    *("--model.depth=0", "--model.num_heads=0", "--model.embed_dim=65536", "--task.decoder_width=65536"),
    *("--task.decoder_depth=1001", f"--task.decoder_width={2**63}", "--task.mask_ratio=inf", "--patch_size=65537"),
    *("--img_size=65537", "--workers=1025", "--threads=99999999999", "--warmup_epochs=inf", "--warmup_epochs=5000"),
    *("--blr=inf", f"--clip={10**400}", "--from=a\nb"),
)
WORDS = {  # of their messages, where it is not the option
    "--model.embed_dim=65536": "does not fit in the",
    "--task.decoder_width=65536": "does not fit in the",
    "--from=a\nb": "a b is not the folder of a run",
}


@pytest.mark.parametrize("option", FOUND)
def test_found_errors_have_a_message(option, capfd):
    name = option.partition("=")[0]
    words = ["pretrain", *(word for word in [*SMALL, "--task=mae"] if word.partition("=")[0] != name), option]
    if option.startswith("--task.decoder_width"):
        words.append("--task.decoder_heads=1")
    code, err = run_command(words, capfd)
    assert code == 2 and WORDS.get(option, name) in err


def test_found_errors_of_configurations_have_a_message(capfd, tmp_path):
    for text, word in (
        *(("a: &a [*a]", "repeats"), ("clip: !!binary x", "not YAML"), ("seed: 2026-13-20", "not YAML")),
        *(("{" * 3000, "not YAML"), ("clip: !!binary eA==", "plain value"), ("clip: {a: 1}", "plain value")),
        *(("seed: 2026-11-20", "plain value"), ("1: 2", "one setting and its value per line")),
    ):
        (tmp_path / "run.yaml").write_text(text)
        code, err = run_command(["pretrain", *SMALL, "--config", "run.yaml"], capfd)
        assert code == 2 and word in err


def test_names_that_no_file_can_have(capfd):
    for name in ("", "a\0b", "\ud83d", "a/" * 2000, "a" * 300):
        for words in (["check", "images", f"--out={name}"], ["look", name], ["export", name]):
            assert run_command(words, capfd)[0] == 2
        assert run_command(["evaluate", "knn", name, "images"], capfd)[0] == 2


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5368709120 bytes.", 2, "5 GiB more were"),
        # torch raises it from its signal handler, so at any place
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", 75, "a process that read images has died"),
    ],
)
def test_errors_of_torch_anywhere_are_a_sentence(message, code, words, monkeypatch, capfd):
    def failing(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr("patchloom.export.encoder.load_encoder", failing)
    assert cli.main(["export", "nowhere"]) == code
    err = capfd.readouterr().err
    assert err.startswith("patchloom: ") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_damaged_files(name, tmp_path):
    """As `benchmarks/fuzz.py` does with thousands."""
    form = fuzz.FORMATS[name]
    (tmp_path / "whole").mkdir()
    form.write(tmp_path / "whole")
    assert fuzz.attempt(form, tmp_path / "whole" / form.file).outcome == "read"
    for number in range(4):
        found = fuzz.attempt(form, fuzz.damaged(name, 51, number, tmp_path))
        assert found.outcome in ("read", "refused"), (number, found)


def test_a_fault_is_seen(tmp_path):
    """The fuzz can fail: by an exception of any other kind, and by memory."""
    (tmp_path / "a").write_bytes(b"words")

    def broken(path):
        raise ValueError(path)

    def silent(path):
        raise PatchloomError(" ")

    for read in (broken, silent):
        assert fuzz.attempt(fuzz.Format(lambda _: None, "a", read), tmp_path / "a").outcome == "traceback"
    greedy = fuzz.Format(lambda _: None, "a", lambda _: bytearray(2**26))
    assert not sys.platform.startswith("linux") or fuzz.attempt(greedy, tmp_path / "a").peak > 2**25
    content = bytes(range(256)) * 4
    changed = {fuzz.mutate(content, random.Random(seed)) for seed in range(50)}
    assert len(changed) > 45 and content not in changed and fuzz.mutate(b"", random.Random(0)) == b""
    assert fuzz.mutate(content, random.Random(3)) == fuzz.mutate(content, random.Random(3))
