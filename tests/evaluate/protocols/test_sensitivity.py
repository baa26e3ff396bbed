"""Position sensitivity of frozen encoders: on images whose patches carry their number, and on noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier, ClassifierCard, save_classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.sensitivity import PositionProbe, train_probe
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.encode import encode, prefix_count
from patchloom.withhold.encoder_input import all_patches, drop_positions

SIZES = {"depth": 1, "embed_dim": 32, "num_heads": 2}
QUICK = {"device": "cpu", "steps": 60}
CHANCE = 1 / 12  # 4 of 16 positions are given


def write_encoder(path: Path, seed: int = 0, size: int = 8, positions: str = "sincos", **sizes) -> Path:
    spec = EncoderSpec("nano", (size, size), 2, channels=1, positions=positions, options=SIZES | sizes)
    torch.manual_seed(seed)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,), (0.3,), "droppos", "tiny"), path)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "encoder.safetensors")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders without labels: every pixel is noise; or one corner of every patch tells its row, another its column."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    row, column = np.mgrid[:8, :8] // 2
    for name in ("noise", "marked"):
        (root / name).mkdir()
        for i in range(60):
            pixels = rng.integers(0, 256, (8, 8))
            if name == "marked":
                pixels[::2, ::2], pixels[1::2, 1::2] = (70 * row)[::2, ::2], (70 * column)[::2, ::2]
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:02}.png")
    return {name: root / name for name in ("noise", "marked")}


def top1(report) -> dict[str, float]:
    return {row.encoder: row.value for row in report.rows if row.settings["measure"] == "top-1"}


OURS = {"placeholder": "learned", "standardize": True}


@pytest.mark.parametrize("how", [{}, OURS], ids=str)
def test_marks_are_read_and_noise_is_not(encoder: Path, images: dict[str, Path], how: dict[str, Any]) -> None:
    marked = evaluate("position-sensitivity", encoder, images["marked"], **how, **QUICK)
    noise = evaluate("position-sensitivity", encoder, images["noise"], **how, **QUICK)
    assert top1(marked)["tiny"] > 0.6 and top1(marked)["chance"] == pytest.approx(CHANCE)
    assert top1(noise)["tiny"] < 0.2
    assert ("a learned vector" if "placeholder" in how else "zeros") in marked.protocol
    assert ("standardised" in marked.protocol) == ("standardize" in how)
    assert marked.n_test == 12 and "a fifth was split off" in marked.protocol
    distance = {row.encoder: row for row in marked.rows if row.settings["measure"] == "distance"}
    assert distance["tiny"].value < 1 < distance["always the centre"].value and distance["tiny"].unit == "patches"


def test_by_default_a_linear_layer_alone_is_trained(encoder: Path) -> None:
    """DropPos Table 7: a linear head on features of a frozen encoder, and nothing else that learns."""
    probe = PositionProbe(load_encoder_file(encoder)[0], "zeros")
    assert {name for name, one in probe.named_parameters() if one.requires_grad} == {"layer.weight", "layer.bias"}
    images = torch.randn(4, 1, 8, 8)
    placed = probe.place(images, torch.Generator().manual_seed(0), 0.75)
    given = drop_positions(all_patches(images, 16), placed.dropped.nonzero()[:, 1].view(4, 12))
    tokens = encode(probe.vit, given, position_token=torch.zeros(32))[:, prefix_count(probe.vit) :]
    torch.nn.init.normal_(probe.layer.weight)
    again = probe.place(images, torch.Generator().manual_seed(0), 0.75)
    torch.testing.assert_close(again.logits, tokens @ probe.layer.weight.T + probe.layer.bias)


@pytest.mark.parametrize("placeholder", ["learned", "zeros"])
def test_the_encoder_stays_frozen(encoder: Path, placeholder: str) -> None:
    vit, _ = load_encoder_file(encoder)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    probe = PositionProbe(vit, placeholder)
    generator = torch.Generator().manual_seed(0)
    train_probe(probe, [torch.randn(8, 1, 8, 8) for _ in range(5)], 0.75, generator, 5)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    assert not vit.training and not probe.training
    assert bool(probe.token.any()) == (placeholder == "learned") and probe.layer.weight.any()


def test_masked_positions_are_hidden(encoder: Path) -> None:
    """On patches that are all alike, those without position get one answer wherever they are."""
    probe = PositionProbe(load_encoder_file(encoder)[0], "learned").eval()
    torch.nn.init.normal_(probe.layer.weight), torch.nn.init.normal_(probe.token)
    with torch.inference_mode():
        placed = probe.place(torch.ones(3, 1, 8, 8), torch.Generator().manual_seed(0), 0.75)
    assert placed.dropped.sum(1).tolist() == [12] * 3
    for logits, dropped in zip(placed.logits, placed.dropped, strict=True):
        torch.testing.assert_close(logits[dropped], logits[dropped][:1].expand(12, -1), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits[~dropped], logits[dropped][:1], atol=1e-2)


def test_before_and_after_finetuning(encoder: Path, images: dict[str, Path], tmp_path: Path) -> None:
    other = write_encoder(tmp_path / "other.safetensors", seed=5)
    vit, card = load_encoder_file(other)
    settled = ClassifierCard(card, "keep", "mean", ("a", "b"), "photos", "0" * 16, 0, {})
    save_classifier(Classifier(vit, 2, "mean"), settled, tmp_path / "classifier.safetensors")
    files = (other, tmp_path / "classifier.safetensors")
    of_encoder, of_classifier = (
        evaluate("position-sensitivity", encoder, images["marked"], finetuned=file, **QUICK | {"steps": 10})
        for file in files
    )
    assert of_encoder.rows == of_classifier.rows
    assert [row.encoder for row in of_encoder.quoted] == ["tiny", "fine-tuned", "untrained", "chance"]
    assert " fine-tuned, " in of_encoder.headline
    found = top1(of_encoder)
    assert found["tiny"] != found["fine-tuned"]
    alone = evaluate("position-sensitivity", other, images["marked"], **QUICK | {"steps": 10})
    assert top1(alone)["tiny"] == found["fine-tuned"]


def test_one_seed_one_result(encoder: Path, images: dict[str, Path]) -> None:
    first, again, other = (
        evaluate("position-sensitivity", encoder, images["noise"], seed=seed, **QUICK | {"steps": 5})
        for seed in (0, 0, 1)
    )
    assert first.rows == again.rows and top1(first) != top1(other)


def test_refusals(encoder: Path, images: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    none = write_encoder(tmp_path / "none.safetensors", positions="none")
    larger = write_encoder(tmp_path / "larger.safetensors", size=12)
    for words, said in (
        ([none], "tiny has no position embeddings to mask"),
        ([encoder, "--finetuned", none], "fine-tuned has no position embeddings"),
        ([encoder, "--finetuned", larger], "fine-tuned has another patch grid than tiny"),
        ([encoder, "--finetuned", tmp_path / "nothing.safetensors"], "there is no encoder at"),
        ([encoder, "--ratio", "0"], "--ratio must be a fraction above 0"),
        ([encoder, "--steps", "0"], "--steps must be 1 or more"),
        ([encoder, "--placeholder", "ones"], "--placeholder cannot be ones: it takes learned or zeros"),
    ):
        capsys.readouterr()
        assert (
            main(["evaluate", "position-sensitivity", str(words[0]), str(images["noise"]), *map(str, words[1:])]) == 2
        )
        out, err = capsys.readouterr()
        assert said in err and err.count("\n") == 1 and not out
    with pytest.raises(PatchloomError, match="--placeholder cannot be ones"):
        evaluate("position-sensitivity", encoder, images["noise"], placeholder="ones")


def test_from_the_command_line(
    encoder: Path, images: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "encoder.safetensors").write_bytes(encoder.read_bytes())
    words = [str(tmp_path), str(images["noise"]), "--steps", "3", "--max_train", "20", "--ratio", "0.5"]
    assert main(["evaluate", "position-sensitivity", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "50 % of the position embeddings" in printed
    assert "12.5 % chance on 12 test images." in printed
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + 3 * 3 + 1
