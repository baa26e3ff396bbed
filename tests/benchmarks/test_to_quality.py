"""Times to a quality: the commands of the peers, the first file that reaches a target, and the table."""

from pathlib import Path

import pytest
import to_quality as quality
import torch

from patchloom.nets.build import EncoderSpec, build_encoder


def trial(arm: str, tmp_path: Path = Path("out"), job: str = "cifar") -> quality.Trial:
    return quality.Trial(quality.JOBS[job], Path("data"), quality.ARMS[arm], 3.0, 7, tmp_path)


def options(words: list[str]) -> dict[str, str]:
    return {word[2:]: value for word, value in zip(words, words[1:], strict=False) if word.startswith("--")}


@pytest.mark.parametrize("job", quality.JOBS)
def test_hugging_face_gets_the_shape_of_nano(job: str) -> None:
    words = quality.hugging_face(trial("hf", job=job), Path("processor"))
    given = options(words)
    shape = dict(pair.split("=") for pair in given["config_overrides"].split(","))
    side, patch = quality.JOBS[job].side, quality.JOBS[job].patch
    vit = build_encoder(EncoderSpec("nano", (side, side), patch))
    block = vit.blocks[0]
    sizes = {"hidden_size": vit.embed_dim, "num_hidden_layers": len(vit.blocks), "image_size": side}
    sizes |= {"num_attention_heads": block.attn.num_heads, "intermediate_size": block.mlp.fc1.out_features}
    sizes |= {"patch_size": patch}
    assert {name: int(shape[name]) for name in sizes} == sizes
    assert not any(name.startswith("decoder") for name in shape)  # its own, as documented
    assert given["per_device_train_batch_size"] == "8" and given["base_learning_rate"] == "0.00015"
    assert given["num_train_epochs"] == "3.0" and given["seed"] == "7" and "--do_eval" not in words


def test_the_first_that_reaches_is_found_in_few_measures() -> None:
    for first in (0, 1, 5, 9):
        asked: list[int] = []

        def reaches(number: int, asked: list[int] = asked, first: int = first) -> bool:
            asked.append(number)
            return number >= first

        assert quality.first_reaching(10, reaches) == first and len(asked) <= 5
    assert quality.first_reaching(10, lambda number: False) is quality.first_reaching(0, lambda number: True) is None


def test_a_row_has_the_cold_start_in_the_place_of_the_warm_one() -> None:
    warm = [quality.Reached(10.0, seconds, 20_000, 0.4, 500.0) for seconds in (52.4, 50.0, 70.0)]
    cells = quality.row("patchloom", [30.0, 40.0, 50.0], warm).strip("| ").split(" | ")
    assert cells[:3] == ["patchloom", "40 (30-50)", "10 (10-10)"]
    assert cells[-3:] == ["20,000 (20,000-20,000)", "52 (50-70)", "80 (72-110)"]
    short = quality.Reached(10.0, None, 30_000, 0.311, 500.0)
    cells = quality.row("hf", [30.0, 40.0], [warm[0], short])
    assert "not reached by 1 of 2" in cells and "31.1" in cells


def test_the_writer_writes_what_is_loaded_again(tmp_path: Path) -> None:
    job = quality.JOBS["cifar"]
    vit = build_encoder(EncoderSpec("nano", (job.side, job.side), job.patch)).eval()
    write = quality.Writer(2, tmp_path / "weights")
    for _ in range(5):
        write(vit, (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    files = sorted(quality.weights_in(tmp_path / "weights"))
    assert [path.name for path in files] == ["0000002.pt", "0000004.pt"]
    again, mean, std = quality.load(files[0], job)
    images = torch.randn(2, 3, job.side, job.side)
    assert torch.equal(again.forward_features(images), vit.forward_features(images))
    assert (mean, std) == ([0.5, 0.4, 0.3], [0.2, 0.2, 0.1])
