"""Several processes train what one does, within rounding, in every protocol that trains a classifier."""

import csv
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from dense_together import evaluate_together
from safetensors.torch import load_file
from spoken import encoder_of_sound, speech_commands

from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.protocols import evaluate

HERE = {"device": "cpu", "workers": 0, "control": False}
PLAIN = {"epochs": 2, "batch_size": 16, "max_train": 120, "seed": 3, "precision": "float32"}
# what all processes must have alike: a moving average and the best epoch by shared validation images
KEPT = {"validation": 0.25, "patience": 1.0, "ema": 0.9, "clip": 0.5}


def _run(tiny: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(tiny, folder / "encoder.safetensors")
    return folder


def _values(run: Path) -> list[float]:
    return [float(row["value"]) for row in csv.DictReader((run / "results.csv").open())]


def _compared(tmp_path: Path, one: Path, two: Path, protocol: str, data: str, options: dict) -> list[str]:
    """Evaluate by one process in a folder, and by two in another; what the first of the two printed, and the second."""
    found = {}
    for run, world in ((one, 1), (two, 2)):
        codes, out, err = evaluate_together(protocol, run, data, world, tmp_path / f"cache{world}", **options)
        assert codes == [0] * world, err
        found[world] = [torch.load(run / f"{rank}.pt") for rank in range(world)]
    (whole,), parts = found[1], found[2]
    for name, value in whole.items():
        assert torch.equal(parts[0][name], parts[1][name]), name
        assert torch.allclose(value.float(), parts[0][name].float(), atol=2e-5), name
    assert _values(one) == pytest.approx(_values(two), abs=0.02)
    assert not out[1].strip()
    return out


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("finetune", KEPT | {"control": "false"}),
        ("finetune", {"pooling": "class", "accumulate": 2, "control": "false"}),
        ("linear", {"recipe": "mae", "blr": 10}),
        ("blocks:1", {"control": "false"}),
    ],
)
def test_two_processes_train_what_one_does(
    tiny_encoder: Path, tmp_path: Path, protocol: str, options: dict[str, object]
) -> None:
    one, two = (_run(tiny_encoder, tmp_path / name) for name in ("one", "two"))
    out = _compared(tmp_path, one, two, protocol, "digits", PLAIN | options)
    assert "images by 2 processes with the recipe" in " ".join(out[0].split())


def test_two_processes_spot_keywords_as_one_does(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    words = speech_commands(tmp_path / "words")
    one, two = (encoder_of_sound(tmp_path / name) for name in ("one", "two"))
    options = {"epochs": 2, "batch_size": 4, "words": "yes,no", "precision": "float32", "control": "false"}
    _compared(tmp_path, one, two, "keywords", str(words), options)


def test_killed_it_goes_on_as_if_it_had_not_been(tiny_encoder: Path, tmp_path: Path) -> None:
    whole, killed = (_run(tiny_encoder, tmp_path / name) for name in ("whole", "killed"))
    options = PLAIN | KEPT | {"mixup": 0.8, "erasing": 0.5, "drop_path": 0.1, "control": "false"}
    codes, _, err = evaluate_together("finetune", whole, "digits", 2, tmp_path / "cache", **options)
    assert codes == [0, 0], err
    codes, _, err = evaluate_together("finetune", killed, "digits", 2, tmp_path / "cache", dies=7, **options)
    assert codes == [75, -signal.SIGKILL]
    assert err[0].count("another process has died") == 1 and err[0].count("\n") == 1, err[0]
    codes, out, err = evaluate_together("finetune", killed, "digits", 2, tmp_path / "cache", **options)
    assert codes == [0, 0], err
    assert "tiny resumes at epoch 1.4 of 2." in out[0]
    saved = [(run / "finetuned" / "digits-small-3.safetensors").read_bytes() for run in (whole, killed)]
    assert saved[0] == saved[1] and _values(whole) == _values(killed)


def test_stopped_all_wait_for_the_first_which_writes_the_checkpoint(tiny_encoder: Path, tmp_path: Path) -> None:
    run = _run(tiny_encoder, tmp_path / "run")
    stop = {"dies": 7, "number": signal.SIGTERM}
    codes, _, err = evaluate_together("finetune", run, "digits", 2, tmp_path / "cache", **PLAIN | stop)
    assert codes == [130, 130] and "run the same command to resume" in err[0] and not err[1].strip()
    assert [(run / f"{rank}.saw").read_text() for rank in range(2)] == ["saved", "saved"]


def test_parts_of_a_step_are_the_step(tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = Classifier.forward

    def noted(self: Classifier, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Classifier, "forward", noted)
    found = []
    for parts in (1, 3):
        run = _run(tiny_encoder, tmp_path / str(parts))
        evaluate("finetune", run, "digits", **PLAIN | {"batch_size": 24, "accumulate": parts}, **HERE)
        found.append(load_file(run / "finetuned" / "digits-small-3.safetensors"))
        seen.append(0)
    whole, third = seen[: seen.index(0)], seen[seen.index(0) + 1 :]
    assert whole[0] == 24 and third[:3] == [8, 8, 8]
    for name, value in found[0].items():
        assert torch.allclose(value.float(), found[1][name].float(), atol=2e-5), name


@pytest.mark.parametrize(
    ("protocol", "options", "said"),
    [
        ("knn", {"devices": 2}, "knn is for one process: leave out --devices 2"),
        ("knn", {"accumulate": 2}, "knn has no training steps: leave out --accumulate 2"),
        ("linear", {"devices": 2}, "linear --recipe logistic is for one process: leave out --devices 2"),
        ("few-shot", {"method": "linear", "devices": 2}, "few-shot --method linear is for one process"),
        ("linear", {"recipe": "mae", "accumulate": 2}, "--accumulate has no effect here"),
        ("finetune", {"devices": 0}, "--devices must be 1 or more, not 0"),
    ],
)
def test_what_has_no_steps_to_share_is_refused(
    tiny_encoder: Path, protocol: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(PatchloomError, match=re.escape(said)):
        evaluate(protocol, tiny_encoder, "digits", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 5}, "--batch_size 5 cannot be shared by 2 processes: give a multiple of 2"),
        (
            {"batch_size": 8, "accumulate": 3},
            "--batch_size 8 cannot be shared by 2 processes and in 3 parts (--accumulate): give a multiple of 6",
        ),
        ({"batch_size": 6, "mixup": 0.5}, "by 2 processes, with pairs for mixup: give a multiple of 4"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused_once(
    tiny_encoder: Path, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    run = _run(tiny_encoder, tmp_path / "run")
    codes, _, err = evaluate_together("finetune", run, "digits", 2, tmp_path / "cache", **PLAIN | options)
    assert 0 not in codes and said in " ".join(err[0].split()) and not err[1].strip()
