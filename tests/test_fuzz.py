"""Random words on the command line and in configurations, and damaged files: a message or success, never a traceback.

Nothing is trained: `pretrain` ends after its task is built.
"""

import random
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killing import draw_images
from typed import SMALL, configuration, other_verb, pretraining

from patchloom import cli, options
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec
from patchloom.runs.task import prepare_task
from patchloom.train import loop, resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fuzz  # noqa: E402, found by the path above

FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


# cached, because the options of a task do not change and take most of the time
PARSER = cache(options.pretrain_parser)


@pytest.fixture(autouse=True)
def untrained(monkeypatch, tmp_path):
    """End `pretrain` after the settings are resolved and the task is built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "pretrain_parser", PARSER)
    monkeypatch.setattr("patchloom.system.hardware.cached_figure", lambda *_, **__: 1.0)

    def planned(decide):
        plan = decide()
        prepare_task(plan.settings, plan.stats)
        raise SystemExit(0)

    def end(*_, **__):
        raise PatchloomError("the end")

    monkeypatch.setattr(loop, "launch", lambda *_: None)
    monkeypatch.setattr(loop, "first_decides", planned)
    monkeypatch.setattr("patchloom.bench.Step", end)
    monkeypatch.setattr(sys.modules["patchloom.check"], "propose", end)  # the module, not the function of its name
    draw_images(tmp_path / "images", 6)


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


@pytest.mark.parametrize("strategy, examples", [(pretraining(), 300), (other_verb(), 150)], ids=["pretrain", "verbs"])
def test_random_words(strategy, examples, capfd):
    ends = set()

    @settings(FUZZ, max_examples=examples)
    @given(strategy)
    def check_one(words):
        ends.add(run_command(words, capfd)[0])

    check_one()
    assert {0, 2} <= ends, "words of all kinds were tried"


def test_random_configurations(tmp_path, capfd):
    file, ends = tmp_path / "run.yaml", set()

    @settings(FUZZ, max_examples=200)
    @given(configuration, st.booleans())
    def check_one(content, alone):
        file.write_bytes(content)
        ends.add(run_command(["pretrain", *([] if alone else SMALL), "--config", str(file)], capfd)[0])

    check_one()
    assert {0, 2} <= ends


# errors found by the fuzz test, or by a sweep of every option over every word and number
FOUND = {
    "--model.depth=0": "--model.depth must be 1 to 1000, not 0",
    "--model.num_heads=0": "--model.num_heads must be 1 to 65536",
    "--model.embed_dim=65536": "does not fit in the",
    "--task.decoder_width=65536": "does not fit in the",
    "--task.decoder_depth=1001": "--task.decoder_depth must be 1000 or less",
    f"--task.decoder_width={2**63}": "--task.decoder_width cannot be so large",
    "--task.mask_ratio=inf": "a mask ratio of inf leaves 0 of",
    "--patch_size=65537": "--patch_size must be positive and 65536 or less",
    "--img_size=65537": "--img_size must be positive and 65536 or less",
    "--workers=1025": "--workers must be 1024 or less",
    "--threads=99999999999": "--threads must be 1024 or less",
    "--warmup_epochs=inf": "--warmup_epochs must be 2147483647 or less",
    "--warmup_epochs=5000": "--warmup_epochs 5000.0 exceeds --epochs",
    "--blr=inf": "--blr must be above 0 and finite",
    f"--clip={10**400}": "--clip cannot be a number of 401 digits",
    "--from=a\nb": "a b is not the folder of a run",
}


@pytest.mark.parametrize("option", FOUND)
def test_found_errors_have_a_message(option, capfd):
    name = option.partition("=")[0]
    words = ["pretrain", *(word for word in [*SMALL, "--task=mae"] if word.partition("=")[0] != name), option]
    if option.startswith("--task.decoder_width"):
        words.append("--task.decoder_heads=1")
    code, err = run_command(words, capfd)
    assert code == 2 and FOUND[option] in err


CONFIGURED = {
    "a: &a [*a]": "a repeats another part",
    "clip: !!binary x": "not YAML",
    "clip: !!binary eA==": "clip in the configuration run.yaml must be a plain value",
    "clip: {a: 1}": "clip in the configuration run.yaml must be a plain value: it contains further settings",
    "seed: 2026-11-20": "seed in the configuration run.yaml must be a plain value",
    "seed: 2026-13-20": "is not YAML: month must be in 1..12",
    "{" * 3000: "is not YAML",
    "1: 2": "one setting and its value per line, such as 'epochs: 100'",
}


@pytest.mark.parametrize("text", CONFIGURED, ids=lambda text: text[:20])
def test_found_errors_of_configurations_have_a_message(text, capfd, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    code, err = run_command(["pretrain", *SMALL, "--config", "run.yaml"], capfd)
    assert code == 2 and CONFIGURED[text] in err


@pytest.mark.parametrize(
    "name", ["", "a\0b", "\ud83d", "a/" * 2000, "a" * 300], ids=["none", "nul", "letter", "deep", "long"]
)
def test_names_that_no_file_can_have(name, capfd):
    for words in (
        ["check", "images", f"--out={name}"],
        ["look", name],
        ["export", name],
        ["evaluate", "knn", name, "images"],
    ):
        assert run_command(words, capfd)[0] == 2


def test_too_little_memory_anywhere_is_a_sentence(monkeypatch, capfd):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5368709120 bytes.")

    monkeypatch.setattr("patchloom.export.encoder.load_encoder", full)
    code, err = run_command(["export", "nowhere"], capfd)
    assert code == 2 and "were in use, and 5 GiB more were requested" in err


def test_a_reading_process_that_dies_anywhere_is_a_sentence(monkeypatch, capfd):
    def killed(*_, **__):  # torch raises it from its signal handler, so at any place
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr("patchloom.export.encoder.load_encoder", killed)
    assert cli.main(["export", "nowhere"]) == 75
    assert capfd.readouterr().err.startswith("patchloom: a process that read images has died")


def test_attention_that_cannot_be_held_is_not_tried():
    spec = EncoderSpec("nano", (4096, 4096), 1, options={"depth": 1})
    form, why = resolve.default_attention("cpu", "float32", spec)
    assert form == "fused" and "16,777,217 x 16,777,217" in why


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
