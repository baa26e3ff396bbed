"""ExtreMA's instance representation outlives its run: saved, measured and exported as the task itself makes it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from labelled import write_noise
from perturbing import perturbed
from refusing import refusal

import patchloom
from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.knn import knn_answers
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder, save_extra_module, untrained_twin
from patchloom.nets.heads import poolings_of, tokens_of
from patchloom.results import store
from patchloom.runs.task import load_task
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
    return perturbed(ExtreMA(vit, head_width=16, head_out=8), 0.1).eval()


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


def _save(task: ExtreMA, folder: Path) -> EncoderCard:
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL)
    card = EncoderCard(spec, (0.3,), (0.4,), "extrema", "small", extra_modules={"head": "pooling"})
    save_encoder(task.encoder, card, folder / "encoder.safetensors")
    save_extra_module(task.agreement.instance_head, folder / "head.safetensors")
    return card


def test_a_head_is_saved_whole_and_read_back(tmp_path: Path) -> None:
    task, path = _task(), tmp_path / "head.safetensors"
    head = task.agreement.instance_head
    card = _save(task, tmp_path)
    before = path.read_bytes()
    for source in (tmp_path, tmp_path / "encoder.safetensors", str(tmp_path)):
        back = patchloom.load_extra_module(source, "pooling")
        assert back.sizes == {"width": 32, "heads": 2, "depth": 2} and not back.training
        assert all(torch.equal(value, head.state_dict()[name]) for name, value in back.state_dict().items())
        assert patchloom.load_extra_module(source, "stem") is None
    shutil.copy(tmp_path / "encoder.safetensors", tmp_path / "another.safetensors")
    for alone in (tmp_path / "another.safetensors", "timm:vit_tiny_patch16_224"):
        assert patchloom.load_extra_module(alone, "pooling") is None
    path.write_bytes(before[: len(before) // 2])
    assert "cannot be read as a module" in refusal(patchloom.load_extra_module, tmp_path, "pooling")
    path.unlink()
    assert patchloom.load_extra_module(tmp_path, "pooling") is None, "an encoder may have been copied alone"
    save_encoder(task.encoder, replace(card, extra_modules={"a/b": "pooling"}), tmp_path / "encoder.safetensors")
    assert "is not what patchloom wrote" in refusal(patchloom.load_extra_module, tmp_path, "pooling")
    with pytest.raises(ValueError, match="Identity is not in EXTRA_MODULES"):
        save_extra_module(torch.nn.Identity(), tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


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


def test_the_control_is_measured_with_the_untrained_head(tmp_path: Path) -> None:
    task = _task()
    card = _save(task, tmp_path)
    report = evaluate("knn", tmp_path, "digits", pooling="instance", max_train=50, device="cpu", seed=3, ks=(1,))
    twin, head = untrained_twin(card, task.agreement.instance_head, 3)
    parts = parts_of("digits", EvalSettings(seed=3, max_train=50))
    train, test = (extract(twin, card, one, device="cpu", head=head) for one in (parts.train, parts.test))
    answers, _ = knn_answers(train.pooled("instance"), train.labels, test.pooled("instance"), (1,))[1]
    (row,) = (row for row in report.quoted if row.encoder == "untrained")
    assert row.pooling == "instance" and row.outcomes.values.tolist() == (answers == test.labels).tolist()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise(tmp_path_factory.mktemp("photos"), 32, 16)


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def run(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["pretrain", str(photos), "--task", "extrema", "--out", str(out), *TINY, *request.param]) == 0
    return out


def test_the_closing_evaluation_reports_it(run: Path) -> None:
    assert "instance_head.safetensors beside it" in (run / "log.txt").read_text()
    rows = store.load(run)
    for protocol in ("knn", "linear"):
        of = {row.encoder for row in rows if row.pooling == "instance" and row.protocol == protocol}
        assert of == {"run", "untrained"}
    knn = [row for row in rows if row.protocol == "knn" and row.encoder == "run" and row.quoted]
    assert [row.pooling for row in knn] == ["mean"]
    linear = [row for row in rows if row.protocol == "linear" and row.encoder == "run"]
    vit, _ = patchloom.load_encoder(run)
    assert {row.pooling for row in linear} == set(
        poolings_of(tokens_of(vit, patchloom.load_extra_module(run, "pooling")))
    )


def test_export_prints_how_to_use_it_with_timm_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), "--to", "timm", "--out", str(tmp_path / "mine.safetensors")]) == 0
    printed = capsys.readouterr().out
    snippet = printed[printed.index("import timm") :]
    assert "patchloom" not in snippet.replace(str(tmp_path), "") and "mine-instance_head.safetensors" in snippet
    names: dict = {}
    exec(snippet, names)
    task = load_task(run).task
    images = torch.rand(3, 3, *task.encoder.patch_embed.img_size)
    normalized = (images - task.mean) / task.std
    with torch.inference_mode():
        torch.testing.assert_close(names["represent"](images), _represented(task, normalized), atol=1e-5, rtol=1e-5)
