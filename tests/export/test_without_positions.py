"""Removal of the place from patch tokens: what it removes, what it leaves, and the printed code that applies it."""

import json

import numpy as np
import pytest
import torch
from exporting import a_run
from PIL import Image
from safetensors.torch import load_file

from patchloom.cli import main
from patchloom.data.loader import plain_batches
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.export.export import export
from patchloom.export.without_positions import remove_positions, turned

GRID, D = (4, 6), 16


def synthetic(seed, images=200):
    """Return tokens [2b n d] of content in all directions but two, and the place in those two.

    Each content is also there in reverse order, so that it does not covary with the place by accident.
    """
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(0))).Q
    index = torch.arange(GRID[0] * GRID[1])
    places = torch.stack([index // GRID[1], index % GRID[1]], 1).float()
    content = torch.randn(images, len(index), D - 2, generator=generator)
    return torch.cat([content, content.flip(1)]) @ basis[:, 2:].T + places @ basis[:, :2].T, basis


def test_a_place_in_two_known_directions_is_removed_exactly():
    tokens, basis = synthetic(1)
    others, _ = synthetic(2)
    found = remove_positions(iter(tokens.split(50)), others, GRID)
    assert (found.images, found.tested) == (400, 400)
    expected = torch.eye(D) - basis[:, :2] @ basis[:, :2].T
    torch.testing.assert_close(found.weight, expected, atol=1e-5, rtol=0)
    assert found.before.r2 == pytest.approx(1, abs=1e-4) and found.before.distance < 0.01
    assert abs(found.after.r2) < 1e-3 and found.after.distance == pytest.approx(found.chance.distance, rel=1e-3)
    assert found.before.accuracy == 1 and found.after.accuracy < 0.06  # chance 1/24
    middle = [((row - 1.5) ** 2 + (column - 2.5) ** 2) ** 0.5 for row in range(4) for column in range(6)]
    assert found.chance == pytest.approx((0, sum(middle) / 24, 1 / 24))


def test_two_directions_are_enough_where_content_and_place_share_directions():
    mix = torch.randn(D, D, generator=torch.Generator().manual_seed(3))
    tokens, others = (synthetic(seed)[0] @ mix for seed in (1, 2))
    found = remove_positions(iter([tokens]), others, GRID)
    assert found.before.r2 > 0.99 and abs(found.after.r2) < 1e-3
    assert torch.linalg.matrix_rank(found.weight).item() == D - 2
    torch.testing.assert_close(found.weight @ found.weight, found.weight, atol=1e-4, rtol=0)


def test_a_place_that_is_not_row_or_column_stays():
    """A checkerboard does not covary with row or column: it is left, and only the classifier reads it."""
    content = torch.randn(200, 24, D, generator=torch.Generator().manual_seed(0))
    content = torch.cat([content, content.flip(1)])
    index = torch.arange(24)
    board = ((index // 6 + index % 6) % 2 * 2 - 1).float()
    tokens = content + 5 * board[:, None] * torch.eye(D)[0]
    found = remove_positions(iter([tokens]), tokens, GRID)
    assert abs(found.before.r2) < 0.05 and found.after.accuracy > 1.5 / 24


def test_grids_of_one_row_or_one_patch():
    tokens = synthetic(1)[0]
    row = remove_positions(iter([tokens]), synthetic(2)[0], (1, 24))  # one axis
    assert torch.linalg.matrix_rank(row.weight).item() == D - 1 and abs(row.after.r2) < 1e-3 < row.before.r2
    with pytest.raises(PatchloomError, match="a single patch has no place"):
        remove_positions(iter([tokens[:, :1]]), tokens[:, :1], (1, 1))


def photographs(folder, count):
    """Write small images of random squares."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        squares = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(np.kron(squares, np.ones((4, 4, 1), np.uint8))).save(folder / f"{i:02}.png")
    return folder


def test_images_are_flipped_and_turned_but_not_bent():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    made = turned(image.expand(200, -1, -1, -1), torch.Generator().manual_seed(0))
    assert len({tuple(one.flatten().tolist()) for one in made}) == 8  # all symmetries of a square
    wide = turned(torch.arange(6.0).view(1, 1, 2, 3).expand(50, -1, -1, -1), torch.Generator().manual_seed(0))
    assert len({tuple(one.flatten().tolist()) for one in wide}) == 4


@pytest.mark.parametrize("options", [{}, {"model": "nano", "class_token": False}, {"reg_tokens": 2}], ids=str)
def test_the_printed_code_applies_the_map_to_patch_tokens_only(options, tmp_path, capsys):
    photos = photographs(tmp_path / "photos", 40)
    run = a_run(tmp_path / "run", photos, **options)
    assert main(["export", str(run), "--without_positions", "--data", str(photos), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["result"]
    weight = load_file(told["without_positions"]["file"])["weight"]
    assert weight.shape == (32, 32)
    pasted: dict = {}
    exec(told["snippet"], pasted)
    (images,) = next(plain_batches(open_data(str(photos)).train, (16, 16), 8)).views
    images = images.float() / 255
    before, after = pasted["features"](images), pasted["features_without_positions"](images)
    prefix = 0 if options.get("class_token") is False else 1 + options.get("reg_tokens", 0)
    assert torch.equal(before[:, :prefix], after[:, :prefix])
    torch.testing.assert_close(after[:, prefix:], before[:, prefix:] @ weight.T)
    torch.testing.assert_close(pasted["vectors"](images), after[:, prefix:].mean(1))
    linear = torch.nn.Linear(32, 32, bias=False)
    linear.load_state_dict({"weight": weight})
    scores = told["without_positions"]
    assert scores["before"]["r2"] > 0.5 and abs(scores["after"]["r2"]) < 0.1
    assert scores["after"]["distance"] > 0.9 * scores["chance"]["distance"] > scores["before"]["distance"]


def test_the_map_needs_images_and_timm(tmp_path):
    photos = photographs(tmp_path / "photos", 12)
    run = a_run(tmp_path / "run", photos)
    with pytest.raises(PatchloomError, match="--without_positions is only for --to timm"):
        export(run, to="onnx", without_positions=True)
    with pytest.raises(PatchloomError, match="--without_positions needs images, but"):
        export(run / "encoder.safetensors", without_positions=True)
    few = photographs(tmp_path / "few", 4)
    with pytest.raises(PatchloomError, match="needs 10 images or more"):
        export(run, data=str(few), without_positions=True)
