"""ExtreMA's instance representation outlives its run: saved, measured and exported as the task itself makes it."""

import csv
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate import frozen
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import (
    ENCODER_FORMAT,
    EncoderCard,
    load_module_file,
    save_encoder,
    save_extra_module,
    save_net,
    untrained_twin,
)
from patchloom.nets.heads import InstanceHead, poolings_of, tokens_of
from patchloom.tasks import build_task, with_defaults
from patchloom.tasks.extrema import ExtreMA
from patchloom.withhold.encoder_input import all_patches

pytestmark = pytest.mark.usefixtures("quick_probe")

DIGITS = open_data("digits").train.subset(range(20))
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
CARD = EncoderCard(None, (0.3,), (0.4,), "extrema", "small")
TINY = ["--epochs", "1", "--batch_size", "16", "--model", "nano", "--model.embed_dim", "32", "--model.depth", "1"]
# a class token in the encoder must not be taken for a patch
RUNS = {"plain": [], "class token": ["--model.class_token", "true"]}


def _task(**options) -> ExtreMA:
    torch.manual_seed(0)
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL | options))
    task = ExtreMA(vit, head_width=16, head_out=8)
    with torch.no_grad():  # zero biases and equal scales would hide mistakes
        for weight in task.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return task.eval()


def _represented(task: ExtreMA, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return task.agreement.represent(task.encoder, all_patches(images, task.geometry.n))


@pytest.mark.parametrize("options", [{"class_token": False}, {}, {"reg_tokens": 3}])
def test_features_are_the_tasks_own_and_of_one_pass(options: dict) -> None:
    task = _task(**options)
    vit, head = task.encoder, task.extra_modules()["instance_head"]
    batches = []
    vit.norm_pre.register_forward_hook(lambda *_: batches.append(1))
    found = extract(vit, CARD, DIGITS, device="cpu", batch_size=7, head=head)
    assert len(batches) == 3
    images = normalize(torch.stack([DIGITS.read(i) for i in range(20)]), CARD.mean, CARD.std)
    own = torch.cat([_represented(task, part) for part in images.split(7)])
    assert torch.equal(found.pooled("instance"), own)
    bare = extract(vit, CARD, DIGITS, device="cpu", batch_size=7)
    assert set(found.poolings()) - set(bare.poolings()) == {"instance"}
    assert all(torch.equal(found.pooled(name), bare.pooled(name)) for name in bare.poolings())


def test_tasks_without_a_head_save_none() -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL))
    assert {name: module.use for name, module in ExtreMA(vit, class_token="mean").extra_modules().items()} == {
        "projection": "stem"
    }
    assert build_task(with_defaults({"name": "mae"}), vit).extra_modules() == {}


def _save(task: ExtreMA, folder: Path) -> EncoderCard:
    """Write an encoder, and beside it the instance head."""
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL)
    card = EncoderCard(spec, (0.3,), (0.4,), "extrema", "small", extra_modules={"head": "pooling"})
    save_encoder(task.encoder, card, folder / "encoder.safetensors")
    save_extra_module(task.agreement.instance_head, folder / "head.safetensors")
    return card


def test_a_head_is_saved_whole_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, path = _task(), tmp_path / "head.safetensors"
    head = task.agreement.instance_head
    _save(task, tmp_path)
    before = path.read_bytes()
    for source in (tmp_path, tmp_path / "encoder.safetensors", str(tmp_path)):
        back = patchloom.load_extra_module(source, "pooling")
        assert back.sizes == {"width": 32, "heads": 2, "depth": 2} and not back.training
        assert all(torch.equal(value, head.state_dict()[name]) for name, value in back.state_dict().items())
        assert load_module_file(source, "stem") is None
    shutil.copy(tmp_path / "encoder.safetensors", tmp_path / "another.safetensors")
    for alone in (tmp_path / "another.safetensors", "timm:vit_tiny_patch16_224"):
        assert load_module_file(alone, "pooling") is None

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(PatchloomError, match="could not be written"):
            save_extra_module(InstanceHead(32, 2), path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 3

    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(PatchloomError, match="cannot be read as a module beside an encoder"):
        load_module_file(tmp_path, "pooling")
    path.unlink()
    assert load_module_file(tmp_path, "pooling") is None, "an encoder may have been copied alone"


def test_a_head_that_an_older_version_left_is_refused(tmp_path: Path) -> None:
    task, path = _task(), tmp_path / "encoder.safetensors"
    card = replace(_save(task, tmp_path), extra_modules={})
    (tmp_path / "head.safetensors").rename(tmp_path / "instance_head.safetensors")

    save_encoder(task.encoder, card, path)  # by this version, so that the head is another's
    assert load_module_file(tmp_path, "pooling") is None
    as_older = {name: value for name, value in asdict(card).items() if name != "extra_modules"}
    save_net(task.encoder, ENCODER_FORMAT, as_older, path)
    for use in ("pooling", "stem"):
        with pytest.raises(PatchloomError, match="older patchloom wrote .*instance_head.safetensors .*: evaluate with"):
            load_module_file(tmp_path, use)
    (tmp_path / "instance_head.safetensors").unlink()
    assert load_module_file(tmp_path, "pooling") is None


def test_the_untrained_twin_has_an_untrained_head() -> None:
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL)
    card = EncoderCard(spec, (0.3,), (0.4,), "extrema", "small")
    head = _task().agreement.instance_head
    (alone, none), (twin, fresh), (_, again), (_, other) = (
        untrained_twin(card, *rest) for rest in ((), (head,), (head,), (head, 1))
    )
    assert none is None and all(map(torch.equal, alone.parameters(), twin.parameters()))
    assert fresh.sizes == head.sizes and not fresh.training
    assert torch.equal(fresh.token, again.token)
    assert not torch.equal(fresh.token, other.token) and not torch.equal(fresh.token, head.token)
    assert fresh.layers[0].attn.proj.bias.eq(0).all() and fresh.layers[0].gamma_1.eq(0.1).all()


def test_the_control_is_measured_with_the_untrained_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    card = _save(task, tmp_path)
    asked = []
    monkeypatch.setattr(
        frozen, "extract", lambda vit, *a, head, **k: asked.append(head) or extract(vit, *a, head=head, **k)
    )
    evaluate("knn", tmp_path, "digits", pooling="instance", max_train=50, device="cpu", seed=3)
    tokens = [head.token for head in asked]
    expected = (task.agreement.instance_head.token, untrained_twin(card, task.agreement.instance_head, 3)[1].token)
    assert all(map(torch.equal, tokens, (expected[0], expected[0], expected[1], expected[1]))) and len(tokens) == 4


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for label, tone in (("dark", 60), ("light", 190)):
        (root / label).mkdir()
        for i in range(16):
            pixels = np.clip(rng.normal(tone, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / label / f"{i}.png")
    return root


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def run(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["pretrain", str(photos), "--task", "extrema", "--out", str(out), *TINY, *request.param]) == 0
    return out


def _rows(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "results.csv").open()))


def test_the_closing_evaluation_reports_it(run: Path) -> None:
    assert "instance_head.safetensors beside it" in (run / "log.txt").read_text()
    rows = _rows(run)
    for protocol in ("knn", "linear"):
        of = {row["encoder"] for row in rows if row["pooling"] == "instance" and row["protocol"] == protocol}
        assert of == {"run", "untrained"}
    knn = [row for row in rows if row["protocol"] == "knn" and row["encoder"] == "run" and row["quoted"] == "True"]
    assert [row["pooling"] for row in knn] == ["mean"]
    linear = [row for row in rows if row["protocol"] == "linear" and row["encoder"] == "run"]
    vit, _ = patchloom.load_encoder(run)
    assert {row["pooling"] for row in linear} == set(poolings_of(tokens_of(vit, load_module_file(run, "pooling"))))


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_evaluate_by_it_alone(run: Path, photos: Path, protocol: str, capsys: pytest.CaptureFixture) -> None:
    before = len(_rows(run))
    assert main(["evaluate", protocol, str(run), str(photos), "--pooling", "instance"]) == 0
    printed = capsys.readouterr().out
    assert "instance)" in printed and "untrained has an untrained head" in " ".join(printed.split())
    added = _rows(run)[before:]
    assert {row["pooling"] for row in added if row["encoder"] in ("run", "untrained")} == {"instance"}


def test_export_prints_how_to_use_it_with_timm_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), "--to", "timm", "--out", str(tmp_path / "mine.safetensors")]) == 0
    printed = capsys.readouterr().out
    assert "mine-instance_head.safetensors: timm's features, including the instance representation, differ" in printed
    snippet = printed[printed.index("import timm") :]
    assert "patchloom" not in snippet.replace(str(tmp_path), "")
    names: dict = {}
    exec(snippet, names)

    task = _trained(run)
    images = torch.rand(3, 3, *task.encoder.patch_embed.img_size)
    normalized = (images - task.mean) / task.std
    with torch.inference_mode():
        torch.testing.assert_close(names["represent"](images), _represented(task, normalized), atol=1e-5, rtol=1e-5)


def _trained(run: Path) -> ExtreMA:
    from patchloom.runs.task import load_task

    return load_task(run).task


def test_without_a_head_it_is_one_sentence(tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture) -> None:
    spec = EncoderSpec("nano", (8, 8), 2, options=SMALL)
    card = EncoderCard(spec, (0.3,) * 3, (0.4,) * 3, "mae", "x")
    save_encoder(build_encoder(spec), card, tmp_path / "encoder.safetensors")
    assert main(["evaluate", "knn", str(tmp_path), str(photos), "--pooling", "instance"]) == 2
    out, err = capsys.readouterr()
    assert err == ("patchloom: this encoder has no module beside it for instance features: use --pooling mean\n")
    assert not out and not (tmp_path / "results.csv").exists()


def test_a_module_that_nothing_builds_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Identity is not in EXTRA_MODULES"):
        save_extra_module(torch.nn.Identity(), tmp_path / "other.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_card_with_impossible_names_is_called_damaged(tmp_path: Path) -> None:
    card = _save(_task(), tmp_path)
    strange = replace(card, extra_modules={"a/b": "pooling"})
    save_encoder(_task().encoder, strange, tmp_path / "encoder.safetensors")
    with pytest.raises(PatchloomError, match="is not what patchloom wrote"):
        load_module_file(tmp_path, "pooling")
