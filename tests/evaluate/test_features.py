import numpy as np
import pytest
import timm
import torch

from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract, pixel_features, pixels_size
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard

DIGITS = open_data("digits").train.subset(range(20))
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
CARD = EncoderCard(None, (0.3,), (0.4,), "none", "small")


def _images() -> torch.Tensor:
    return normalize(torch.stack([DIGITS.read(i) for i in range(20)]), CARD.mean, CARD.std)


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 3}, {"class_token": False}])
def test_pooling_is_that_of_timm(options: dict) -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL | options)).train()
    found = extract(vit, CARD, DIGITS, device="cpu", batch_size=7)
    assert vit.training
    tokens = vit.eval().forward_features(_images()).detach()
    mean = tokens[:, vit.num_prefix_tokens :].mean(1)
    torch.testing.assert_close(found.pooled("mean"), mean, atol=1e-5, rtol=1e-4)
    assert found.labels.tolist() == DIGITS.labels.tolist()
    assert found.indices.tolist() == list(range(20))
    if options.get("class_token", True):
        registers = ("prefix",) * ("reg_tokens" in options)
        assert found.poolings() == ("class", "mean", *registers, "both")
        torch.testing.assert_close(found.pooled("class"), tokens[:, 0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.pooled("both"), torch.cat([tokens[:, 0], mean], 1), atol=1e-5, rtol=1e-4)
    else:
        assert found.poolings() == ("mean",)
        with pytest.raises(PatchloomError, match="no class token"):
            found.pooled("class")
    if "reg_tokens" in options:
        in_front = torch.cat([tokens[:, :1], tokens[:, 1:4]], dim=1).mean(1)  # class token, three registers
        torch.testing.assert_close(found.pooled("prefix"), in_front, atol=1e-5, rtol=1e-4)
    else:
        with pytest.raises(PatchloomError, match="no register tokens for prefix features: use --pooling mean"):
            found.pooled("prefix")


def test_a_norm_after_pooling_is_applied() -> None:
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=0, global_pool="avg", **SMALL
    ).eval()
    torch.nn.init.uniform_(vit.fc_norm.weight)
    found = extract(vit, CARD, DIGITS, device="cpu")
    torch.testing.assert_close(found.pooled("mean"), vit(_images()).detach(), atol=1e-5, rtol=1e-4)


def test_images_without_labels_are_left_out_or_refused() -> None:
    some = DIGITS.subset(range(20))
    some.labels = np.where(np.arange(20) % 2, some.labels, -1)
    assert pixel_features(some, (8, 8), (0.5,), (0.5,)).labels.tolist() == DIGITS.labels[1::2].tolist()
    some.labels = None
    with pytest.raises(PatchloomError, match="has no labels: put the images of each class in a separate sub-folder"):
        pixel_features(some, (8, 8), (0.5,), (0.5,))


def test_raw_pixels() -> None:
    found = pixel_features(DIGITS, (8, 8), (0.5,), (0.5,))
    expected = torch.stack([DIGITS.read(i) for i in range(20)]).flatten(1) / 127.5 - 1
    torch.testing.assert_close(found.tokens["pixels"], expected)
    assert found.labels.tolist() == DIGITS.labels.tolist()
    assert pixels_size((224, 112)) == (32, 16)
    assert pixel_features(_Wide(), (64, 64), (0.5,) * 3, (0.5,) * 3).tokens["pixels"].shape == (2, 3 * 32 * 32)


def test_a_diverged_encoder_is_named() -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL))
    vit.norm.weight.data[0] = torch.nan
    with pytest.raises(PatchloomError, match="small gives features that are not finite"):
        extract(vit, CARD, DIGITS, device="cpu")


def test_wrong_channels_are_refused() -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=5, options=SMALL))
    with pytest.raises(PatchloomError, match="5 are expected"):
        extract(vit, CARD, DIGITS, device="cpu")


class _Wide(Source):
    name, classes, labels = "wide", ("a", "b"), np.array([0, 1])

    def __len__(self) -> int:
        return 2

    def read(self, i: int) -> torch.Tensor:
        return torch.full((3, 64, 64), i, dtype=torch.uint8)

    def fingerprint(self) -> str:
        return "0" * 16
