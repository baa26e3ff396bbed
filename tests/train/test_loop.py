"""Whole runs on a few images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from patchloom.errors import PatchloomError
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import request
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper

pytestmark = pytest.mark.usefixtures("quick_probe")

SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1}, "batch_size": 8, "precision": "float32", "workers": 0}


def draw_images(folder: Path, count: int = 24) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng([*folder.name.encode()])  # classes share no image
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def test_a_diverged_run_says_so_and_keeps_a_sane_checkpoint(tmp_path):
    images = draw_images(tmp_path / "images")
    with pytest.raises(PatchloomError, match="no longer finite after .* lower --blr"):
        pretrain(images, epochs=40, blr=1e30, clip=0.0, warmup_epochs=0, out=tmp_path / "run", **SMALL)
    saved = load_file(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert all(value.isfinite().all() for value in saved.values())


def test_a_failed_start_leaves_the_folder_free(tmp_path):
    images = draw_images(tmp_path / "images")
    (images / "cut.png").write_bytes((images / "0.png").read_bytes()[:100])
    with pytest.raises(PatchloomError, match="do not divide"):
        pretrain(images, epochs=1, img_size=30, patch_size=4, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()
    assert pretrain(images, epochs=1, img_size=32, patch_size=4, out=tmp_path / "run", **SMALL).summary
    assert "cut.png" in (tmp_path / "run" / "unreadable.txt").read_text()


def test_betas_reach_the_optimiser_and_are_a_setting_of_the_run(tmp_path):
    images = draw_images(tmp_path / "images")
    runs = {
        name: pretrain(images, epochs=2, out=tmp_path / name, **given, **SMALL).folder
        for name, given in {"usual": {}, "same": {"betas": [0.9, 0.95]}, "deit": {"betas": (0.9, 0.999)}}.items()
    }
    weights = {name: load_file(run / "encoder.safetensors") for name, run in runs.items()}
    apart = {
        name: max((value - weights["usual"][key]).abs().max() for key, value in its.items())
        for name, its in weights.items()
    }
    assert apart["same"] == 0 < apart["deit"]
    assert RunFolder(runs["deit"]).read_config().betas == (0.9, 0.999)
    with pytest.raises(PatchloomError, match=r"betas: was \[0.9, 0.95\], now \[0.9, 0.999\]"):
        pretrain(images, epochs=2, out=runs["usual"], betas=[0.9, 0.999], **SMALL)


def test_labels_of_a_single_class_are_no_obstacle(tmp_path):
    images = draw_images(tmp_path / "images")
    listed = "".join(f"{path}\tcat\n" for path in sorted(images.iterdir()))
    (tmp_path / "list.txt").write_text(listed)
    run = pretrain(tmp_path / "list.txt", epochs=1, out=tmp_path / "run", **SMALL)
    assert run.summary.endswith("not what the features are good for.")


def test_pictures_show_every_part_of_the_data(tmp_path, monkeypatch):
    for label in "abc":
        draw_images(tmp_path / "images" / label, 40)
    seen = []
    from patchloom.data import loader
    from patchloom.look import task_pictures

    real = loader.plain_batches
    monkeypatch.setattr(
        task_pictures,
        "plain_batches",
        lambda source, *rest, **more: seen.append(source.labels) or real(source, *rest, **more),
    )
    pretrain(tmp_path / "images", epochs=1, held_out=0.2, out=tmp_path / "run", **SMALL)
    assert set(seen[-1].tolist()) == {0, 1, 2}


def test_a_path_is_never_a_built_in(tmp_path, monkeypatch):
    draw_images(tmp_path / "shapes")
    monkeypatch.chdir(tmp_path)
    assert request(Path("shapes"), "mae", {}).data == str(tmp_path / "shapes")
    assert request("shapes", "mae", {}).data == "shapes"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"betas": [0.9, 1.0]}, r"--betas must lie in \[0, 1\)"),
        ({"betas": [0.9]}, "--betas cannot be"),
        ({"precision": "bf16"}, "--precision cannot be bf16: it takes float32, bfloat16, float16 or auto"),
        ({"positions": "rope"}, "--positions cannot be rope"),
        ({"epochs": "5"}, "--epochs cannot be 5"),
        ({"epochs": None}, "--epochs needs a value: it takes a number or auto"),
        ({"img_size": "16x16"}, "--img_size cannot be 16x16"),
        ({"flip": 1}, "--flip cannot be 1: it takes true or false"),
        ({"blr": float("nan")}, "--blr cannot be nan"),
    ],
)
def test_python_is_as_strict_as_the_command_line(wrong, said):
    with pytest.raises(PatchloomError, match=said):
        request("shapes", "mae", wrong)


def test_python_and_the_command_line_ask_for_the_same(tmp_path):
    from patchloom.options import parse_pretrain

    given, _ = parse_pretrain(
        ["shapes", "--task", "droppos", "--task.sigma", "0.5", "--epochs", "3", "--model", "micro"]
    )
    data, task = given.pop("data"), given.pop("task")
    words = request(data, task, given)
    assert words == request("shapes", {"name": "droppos", "sigma": 0.5}, {"epochs": 3, "model": "micro"})


def test_the_last_update_is_the_mean_of_its_own_steps(tmp_path, monkeypatch):
    """A window of ``--accumulate`` 4 that has only 3 steps gives the gradient of one of 3."""
    images, norms, update = draw_images(tmp_path / "images"), [], Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda *a: norms.append((made := update(*a)).norm) or made)
    short = SMALL | {"batch_size": 4, "held_out": 0.5, "epochs": 1}
    for steps in (3, 4):
        pretrain(images, "mae", accumulate=steps, out=tmp_path / str(steps), **short)
    assert len(norms) == 2 and norms[0] == pytest.approx(norms[1], rel=1e-5)
