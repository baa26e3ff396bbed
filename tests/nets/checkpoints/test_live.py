"""A module of timm in place of a run, in evaluations, embeddings and pictures."""

import numpy as np
import pytest
import timm
import torch
from refusing import refusal

import patchloom
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder, untrained_twin
from patchloom.nets.checkpoints.live import LiveEncoder
from patchloom.runs.encoder import encoder_place, load_encoder, load_extra_module

STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.25)}
SMALL = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def small(model="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return timm.create_model(model, img_size=32, patch_size=8, num_classes=0, **SMALL | options)


@pytest.fixture(scope="module")
def labelled():
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 256 // (1 + i % 2), (32, 32, 3), dtype=np.uint8), i % 2) for i in range(48)]
    return {"train": pairs[:32], "test": pairs[32:]}


def test_a_module_is_measured_as_its_file_and_nothing_is_written(labelled, tmp_path, monkeypatch):
    spec = EncoderSpec("nano", (32, 32), 8, options={"embed_dim": 32, "depth": 1})
    vit = build_encoder(spec).train()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    save_encoder(vit, EncoderCard(spec, *STATISTICS.values(), task="mae", name="own"), tmp_path / "own.safetensors")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = patchloom.evaluate("knn", vit, labelled, mean=torch.tensor(STATISTICS["mean"]), std=STATISTICS["std"])
    filed = patchloom.evaluate("knn", tmp_path / "own.safetensors", labelled)
    ours, theirs = ([one.value for one in report.results] for report in (found, filed))
    assert ours == theirs
    assert {one.encoder for one in found.results} >= {"vit_tiny_patch16_224", "untrained", "raw pixels"}
    patchloom.embed(vit, labelled, to=tmp_path / "vectors.npz", **STATISTICS)
    patchloom.embed(tmp_path / "own.safetensors", labelled, to=tmp_path / "filed.npz")
    assert np.array_equal(*(np.load(tmp_path / name)["vectors"] for name in ("vectors.npz", "filed.npz")))
    (drawn,) = patchloom.look(vit, labelled, what="features", images=1, out=tmp_path / "pictures", **STATISTICS)
    assert drawn.is_file()
    assert not [*(tmp_path / "here").iterdir()] and vit.training
    assert all(torch.equal(before[name], value) for name, value in vit.state_dict().items())


@pytest.mark.parametrize(
    "vit",
    [
        small(),
        small(reg_tokens=2, class_token=False, global_pool="avg", fc_norm=False),
        small(init_values=0.1, qkv_bias=False, mlp_ratio=2),
        timm.models.VisionTransformer(img_size=32, patch_size=8, **SMALL),
        build_encoder(EncoderSpec("swin-nano", (64, 64), 4, positions="none")),
        build_encoder(EncoderSpec("nano", (32, 32), (8, 4), channels=1, positions="none", options={"depth": 1})),
    ],
    ids=["timm", "registers", "scaled", "head", "swin", "grey"],
)
def test_the_untrained_twin_has_the_sizes_of_the_module(vit):
    channels = LiveEncoder.of(vit, (0.5,) * (n := vit.patch_embed.proj.in_channels), (0.2,) * n)
    twin, _ = untrained_twin(channels.card)
    own = {name: value.shape for name, value in vit.state_dict().items() if not name.startswith("head.")}
    assert {name: value.shape for name, value in twin.state_dict().items()} == own
    again, card = load_encoder(channels)
    assert again is not vit and not again.training and card is channels.card
    assert load_extra_module(channels, "pooling") is None


def test_statistics_are_given_or_those_of_published_weights():
    published = LiveEncoder.of(timm.create_model("vit_tiny_patch16_224", num_classes=0))
    assert published.card.mean == (0.5, 0.5, 0.5) and "pretrained_cfg" in published.card.note
    vit = small()
    for given, said in {
        (None, None): "are unknown: give mean",
        ((0.5,) * 3, None): "belong together",
        ((0.5,), (0.2,)): "have 1 numbers, and the module takes 3 channels",
        ((0.5,) * 3, (0.0,) * 3): "none that is 0",
    }.items():
        assert said in refusal(LiveEncoder.of, vit, *given)
    assert "are for a module" in refusal(encoder_place, "timm:vit_tiny_patch16_224", (0.5,) * 3, (0.2,) * 3)


def test_what_is_no_encoder_or_has_no_run_is_refused(labelled):
    assert "Linear is none: give its encoder" in refusal(patchloom.evaluate, "knn", torch.nn.Linear(2, 2), labelled)
    assert "has no run with a task to draw" in refusal(patchloom.look, small(), labelled, **STATISTICS)
    network = {"network": "teacher"} | STATISTICS
    assert "has no teacher" in refusal(patchloom.evaluate, "knn", small(), labelled, **network)
