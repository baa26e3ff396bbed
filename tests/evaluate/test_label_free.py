"""Measures without labels: their values on features that are known, and their rows beside the controls."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers
from PIL import Image
from refusing import refusal
from scipy.sparse.csgraph import minimum_spanning_tree
from small import seeded
from spoken import Tones, encoder_of_sound
from swins import spec_of

from patchloom.data.augment import RandomCrop
from patchloom.data.loader import plain_batches
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.evaluate import settings
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.label_free import (
    ALPHA,
    AREAS,
    DELTA,
    DENSE_DIMENSIONS,
    DSE,
    DSE_CLUSTERS,
    DSE_GROUP,
    IDEST,
    LIDAR,
    MEASURES,
    RANKME,
    SEPARATION,
    SHARES,
    AreaCrop,
    CropsOf,
    DenseStructure,
    alpha_req,
    dense_structure,
    drawn_images,
    eigenvalues,
    id_est,
    label_free_rows,
    lidar,
    neighbour_overlap,
    overlap_measure,
    own_crop,
    own_crop_found,
    partial_means,
    separation,
    weighted_dse,
)
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, untrained_twin
from patchloom.nets.encode import embed
from patchloom.nets.heads import pooled_tokens
from patchloom.questions.collapse import effective_rank
from patchloom.results.evaluation import Evaluation
from patchloom.withhold.encoder_input import all_patches

ON = EvalSettings(device="cpu", workers=0)


def orthonormal(n: int, d: int) -> torch.Tensor:
    noise = torch.randn(n, d, generator=seeded(), dtype=torch.float64)
    return torch.linalg.qr(noise - noise.mean(0))[0]


def test_rankme_is_exp_of_the_entropy_of_directions() -> None:
    features = torch.zeros(4, 3)
    features[0, 0], features[1, 1] = 3.0, 1.0  # singular values 3 and 1: shares 3/4 and 1/4
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(features) == effective_rank(7.0 * features) == pytest.approx(expected)
    assert effective_rank(orthonormal(300, 24) * (torch.arange(24) < 5)) == pytest.approx(5, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_alpha_is_the_exponent_of_a_power_law(alpha: float) -> None:
    j = torch.arange(1, 65, dtype=torch.float64)
    features = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    features = orthonormal(300, 64) * (300 * j**-alpha).sqrt() @ features
    assert torch.allclose(eigenvalues(features), j**-alpha)
    assert alpha_req(features) == pytest.approx(alpha, abs=1e-8)
    assert alpha_req(5 * features + 100) == pytest.approx(alpha, abs=1e-6)  # neither scale nor mean matter


def test_alpha_looks_at_its_range_alone_and_is_infinite_without_directions_in_it() -> None:
    values = 1 / torch.arange(1, 65, dtype=torch.float64)
    values[:4], values[32:] = 50.0, 1e-4
    assert alpha_req(orthonormal(300, 64) * (300 * values).sqrt()) == pytest.approx(1.0, abs=1e-8)
    values[4] *= 2  # the first one within it
    assert alpha_req(orthonormal(300, 64) * (300 * values).sqrt()) > 1.1
    assert alpha_req(orthonormal(300, 40) * (torch.arange(40) < 6)) == math.inf
    assert alpha_req(torch.ones(50, 20)) == math.inf
    assert math.isfinite(alpha_req(torch.randn(17, 16)))


def crops(between: list[float], within: list[float], n: int = 400, q: int = 40) -> torch.Tensor:
    """[n q d] whose images and whose crops of one image have these deviations along the axes."""
    lots, d = seeded(), len(between)
    images = torch.randn(n, 1, d, generator=lots, dtype=torch.float64) * torch.tensor(between, dtype=torch.float64)
    return images + torch.randn(n, q, d, generator=lots, dtype=torch.float64) * torch.tensor(within)


def test_lidar_is_as_the_paper_writes_it() -> None:
    features = crops([1.0, 0.5, 2.0, 0.1], [0.3, 0.5, 0.1, 0.2], n=30, q=5)
    n, q, d = features.shape
    means = features.mean(1)
    between, within = torch.zeros(2, d, d, dtype=torch.float64)
    for i in range(n):
        apart = means[i] - features.flatten(0, 1).mean(0)
        between += torch.outer(apart, apart) / n
        for crop in features[i]:
            within += torch.outer(crop - means[i], crop - means[i]) / (n * q)
    values, vectors = torch.linalg.eigh(within + DELTA * torch.eye(d))
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    share = torch.linalg.eigvalsh(root @ between @ root)
    share = share / share.sum()
    assert lidar(features) == pytest.approx((-(share * share.log()).sum()).exp().item(), rel=1e-9)


def test_lidar_of_crops_that_do_not_differ_and_of_features_that_collapsed() -> None:
    one = torch.randn(50, 1, 6, generator=seeded()).expand(50, 4, 6)
    assert lidar(one) == pytest.approx(6, abs=0.6)  # δ alone is in the way
    line = torch.randn(50, 4, 1) * torch.tensor([1.0, 2.0, 3.0])
    assert lidar(line) == pytest.approx(1, abs=1e-6)
    assert lidar(torch.ones(50, 4, 6)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("measure", "shape", "said"),
    [
        (lidar, (1, 5, 3), "two images or more"),
        (lidar, (5, 1, 3), "two crops or more"),
        (alpha_req, (300, 15), "to 15 eigenvalues"),
        (alpha_req, (16, 300), "to 15 eigenvalues"),
        (lambda whole: neighbour_overlap(whole, whole, k=10), (11, 4), "too few for 10"),
        (dense_structure, (4, 8, 3), "9 or more"),
        (dense_structure, (1, 9, 3), "two images or more"),
    ],
)
def test_too_few_numbers_are_refused(measure, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure(torch.randn(shape))


def test_id_est_is_the_slope_of_the_trees_lengths() -> None:
    features, order = torch.randn(48, 5, generator=seeded()), torch.randperm(48, generator=seeded())
    sizes = range(18, 49, 3)  # 16ths of 48, from 16 points on
    apart = torch.cdist(features.double(), features.double())
    lengths = [minimum_spanning_tree(apart[order[:size]][:, order[:size]].numpy()).sum() for size in sizes]
    x, y = np.log(sizes), np.log(lengths)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert id_est(features, order) == pytest.approx(1 / (1 - slope), rel=1e-9)
    assert id_est(7 * features + 3, order) == pytest.approx(1 / (1 - slope), rel=1e-4)  # neither scale nor mean matter


def blobs(centres: torch.Tensor, n: int, width: float) -> torch.Tensor:
    """[k n d] points around each of k centres [k d]."""
    return centres[:, None] + width * torch.randn(len(centres), n, centres.shape[1], generator=seeded())


def test_separation_of_two_clusters_by_hand() -> None:
    points = torch.tensor([[0.0, 1], [0, -1], [4, 1], [4, -1], [9, 9]])
    labels = torch.tensor([0, 0, 1, 1, 2])
    # distances from the nearest other centre: 17^.5 for the first four points, and from (9, 9) to (4, 0) 106^.5
    inter = (2 * 17**0.5 + 106**0.5) / 3
    # (0, 1) and (0, -1) have the singular value 2^.5, over max(1, 2)^.5; a cluster of one has none
    assert separation(points, labels) == pytest.approx(inter - 1)
    assert separation(points[:2], labels[:2]) == pytest.approx(-1)  # no other cluster
    assert separation(points[4:], labels[4:]) == 0


def plain_structure(tokens: np.ndarray, labels: list[np.ndarray], grouped: list[np.ndarray]) -> float:
    """Separation of tokens [m p d], written down once more with numpy: clusters are given, point by point."""
    unit = tokens / np.linalg.norm(tokens, axis=2, keepdims=True)
    spread = np.mean([np.linalg.norm(one - unit.reshape(-1, unit.shape[2]).mean(0)) for image in unit for one in image])

    def level(sets: list[np.ndarray], clusters: list[np.ndarray]) -> float:
        found = []
        for points, those in zip(sets, clusters, strict=True):
            members = [points[those == label] for label in np.unique(those)]
            centres = [one.mean(0) for one in members]
            inter, intra = [], []
            for j, one in enumerate(members):
                others = [centre for i, centre in enumerate(centres) if i != j]
                inter.append(np.mean([min(np.linalg.norm(z - centre) for centre in others) for z in one]))
                if len(one) > 1:
                    nuclear = np.linalg.svd(one - centres[j], compute_uv=False).sum()
                    intra.append(nuclear / np.sqrt(max(len(one) - 1, points.shape[1])))
            found.append(np.mean(inter) - np.mean(intra))
        return float(np.mean(found))

    size = DSE_GROUP
    groups = [unit[i : i + size].reshape(-1, unit.shape[2]) for i in range(0, len(unit), size)]
    return (level(list(unit), labels) + level(groups, grouped)) / 2 / spread


def test_dense_structure_beside_a_plain_implementation() -> None:
    """Tight clusters are found unless two of the first centres fall into one: by some seed of eight."""
    m, p, d = 10, 12, 40
    centres = torch.linalg.qr(torch.randn(d, d, generator=seeded()))[0][: DSE_CLUSTERS * m].view(m, DSE_CLUSTERS, d)
    tokens = torch.stack([blobs(one, p // DSE_CLUSTERS, 0.001).flatten(0, 1) for one in centres])
    own = np.repeat(np.arange(DSE_CLUSTERS), p // DSE_CLUSTERS)
    within = [np.concatenate([own + DSE_CLUSTERS * i for i in range(n)]) for n in (8, 2)]
    expected = plain_structure(tokens.double().numpy(), [own] * m, within)
    found = min((dense_structure(tokens, seed) for seed in range(8)), key=lambda one: abs(one.separation - expected))
    assert found.separation == pytest.approx(expected, rel=1e-5)
    ranks = [effective_rank(torch.nn.functional.normalize(tokens[:, place], dim=1)) / m for place in range(p)]
    assert min(ranks) - 1e-6 <= found.dimensions <= max(ranks) + 1e-6
    assert found.dimensions > 0.95 and found.dse == found.separation + found.dimensions
    assert dense_structure(7 * tokens).dse == pytest.approx(dense_structure(tokens).dse, rel=1e-4)


def test_lambda_makes_both_parts_of_dse_vary_alike() -> None:
    parts = [DenseStructure(0.0, 0.5), DenseStructure(2.0, 0.6), DenseStructure(1.0, 0.8)]
    deviation = np.std([0, 2, 1]) / np.std([0.5, 0.6, 0.8])
    assert weighted_dse(parts) == pytest.approx([deviation * 0.5, 2 + deviation * 0.6, 1 + deviation * 0.8])
    assert weighted_dse(parts[:1]) == [0.5]


def test_neighbours_of_each_image_of_equal_ones_and_of_copies() -> None:
    turn = torch.linspace(0, 3.0, 7)  # on a half circle: nearest are those beside
    whole = torch.stack([turn.cos(), turn.sin()], 1)
    part = whole.clone()
    part[0] = whole[2]  # its two nearest, itself left out: 2 and 1 or 3; they were 1 and 2
    kept = neighbour_overlap(whole, part, k=2)
    assert kept[1:].tolist() == [1.0] * 6
    part[0] = whole[6]
    assert neighbour_overlap(whole, part, k=2)[0] == 0
    # an encoder that gives all images one feature once kept all its neighbours, by their index
    whole = torch.full((50, 8), 0.3)
    for part in (whole, 2 * whole, whole + 1e-9 * torch.randn(50, 8)):
        assert neighbour_overlap(whole, part).tolist() == pytest.approx([10 / 49] * 50)
    # of three copies of the nearest one, two are chosen: each is kept if chance chooses it twice
    whole = torch.randn(40, 16, generator=seeded())
    whole[1:4] = whole[0] + 0.01
    kept = neighbour_overlap(whole, whole, k=2)
    assert kept[0].item() == pytest.approx(3 * (2 / 3) ** 2 / 2)
    assert kept[1].item() == pytest.approx(3 * (2 / 3) ** 2 / 2) or kept[1] == 1
    assert neighbour_overlap(whole, whole, k=3)[:4].tolist() == [1.0] * 4


def test_few_patches_are_those_that_come_first_and_all_of_them_the_whole() -> None:
    torch.manual_seed(0)
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "class_token": True}
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=options)).eval()
    images = torch.randn(3, 1, 8, 8)
    order = torch.stack([torch.randperm(16) for _ in range(3)])
    with torch.inference_mode():
        found = partial_means(vit, images, order, (1.0, 0.25, 2 / 16, 0.01))
        assert torch.allclose(found[1.0], pooled_tokens(vit, images)["mean"], atol=1e-5)
        # patches that do not enter may be anything
        assert embed(vit, all_patches(images, 16)).shape[1] == 17
        changed = images.clone()
        for i, hidden in enumerate(order[:, 4:].tolist()):
            for patch in hidden:
                row, column = divmod(patch, 4)
                changed[i, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 9.0
        again = partial_means(vit, changed, order, (1.0, 0.25, 0.01))
    assert torch.equal(found[0.25], again[0.25]) and torch.equal(found[0.01], again[0.01])
    assert not torch.allclose(found[1.0], again[1.0]) and not torch.allclose(found[0.25], found[0.01])
    assert not torch.allclose(found[2 / 16], found[0.01])  # a single patch


class Numbered(Source):
    """Images [1 8 12] of which each pixel tells its image and place; how often they are read is counted."""

    name = "numbered"

    def __init__(self, n: int = 5) -> None:
        self.n, self.reads = n, [0] * n

    def __len__(self) -> int:
        return self.n

    def read(self, i: int) -> torch.Tensor:
        self.reads[i] += 1
        return (torch.arange(96.0).view(1, 8, 12) + 100 * i) / 1000

    def fingerprint(self) -> str:
        return "f" * 16


def test_a_perfect_encoder_finds_every_crop_and_noise_does_at_chance() -> None:
    lots = seeded()
    features = torch.randn(1500, 8, generator=lots)
    assert own_crop_found(features, features * 3).all()  # the cosine knows no length
    assert own_crop_found(features, features + 0.01 * torch.randn(1500, 8, generator=lots)).double().mean() > 0.95
    noise = own_crop_found(features, torch.randn(1500, 8, generator=lots))
    assert noise.sum() <= 6  # of 1,500, where 1 is expected
    assert own_crop_found(torch.ones(1500, 8), torch.ones(1500, 8)).sum() == 1  # collapsed: chance
    assert own_crop_found(torch.eye(4), torch.eye(4)[[0, 2, 1, 3]]).tolist() == [True, False, False, True]


@pytest.mark.parametrize(("area", "sides"), [(1.0, (8, 8)), (0.25, (4, 4))])
def test_a_crop_has_its_share_of_the_centre_and_lies_at_random(area: float, sides: tuple[int, int]) -> None:
    image, rng = Numbered().read(0), np.random.default_rng(0)
    corners = set()
    for _ in range(60):
        (crop,) = AreaCrop(sides, area)(image, rng)
        assert crop.shape == (1, *sides)  # cut alone, where it need not be resized
        corner = round(crop[0, 0, 0].item() * 1000)
        assert torch.allclose(crop[0], image[0, corner // 12 :][: sides[0], corner % 12 :][:, : sides[1]])
        corners.add(divmod(corner, 12))
    rows, columns = ({corner[i] for corner in corners} for i in (0, 1))
    # the square in the middle of 8x12 pixels begins in column 2
    assert (rows, columns) == (({0}, {2}) if area == 1 else (set(range(5)), set(range(2, 7))))


def test_crops_of_a_source_are_read_once_an_image_and_depend_on_the_seed_alone() -> None:
    ways = [AreaCrop((4, 4), 0.25), AreaCrop((4, 4), 0.25), RandomCrop((4, 4))]
    images = Numbered()
    crops = CropsOf(images, ways, seed=1)
    assert len(crops) == 15
    whole = torch.cat([batch.views[0] for batch in plain_batches(crops, (4, 4), 4, channels=1)])
    assert images.reads == [1] * 5
    assert (whole.flatten(1).mean(1) * 10).long().tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert not torch.equal(whole[0], whole[1])  # two places
    alone = CropsOf(Numbered(), ways, seed=1)
    assert torch.equal(alone.read(13), crops.read(13)) and alone.fingerprint() == crops.fingerprint()
    other = CropsOf(Numbered(), ways, seed=2)
    assert any(not torch.equal(other.read(i), crops.read(i)) for i in range(15))
    assert other.fingerprint() != crops.fingerprint()


def values(report: Evaluation, encoder: str) -> dict[str, float]:
    return {row.measure: row.value for row in report.results if row.encoder == encoder}


@pytest.fixture(scope="module")
def report(tiny_encoder: Path) -> Evaluation:
    return evaluate("label-free", tiny_encoder, "digits", device="cpu", images=100)


def test_all_measures_stand_beside_their_controls_and_chance(report: Evaluation) -> None:
    assert tuple(values(report, "tiny")) == tuple(values(report, "untrained")) == tuple(MEASURES)
    assert tuple(values(report, "raw pixels")) == tuple(map(own_crop, AREAS))
    chances = dict.fromkeys(map(own_crop, AREAS), 1 / 100) | dict.fromkeys(map(overlap_measure, SHARES), 10 / 99)
    assert values(report, "chance") == pytest.approx(chances)
    for row in report.results:
        if row.unit == "%" and row.encoder != "chance":
            assert 0 <= row.low <= row.value <= row.high <= 1
            if row.outcomes is not None:  # of crops, which weights at random find as well
                assert row.low > chances[row.measure]
        else:
            assert row.low == row.value == row.high
    ours = values(report, "tiny")
    assert 1 < ours[RANKME] < 32 and 1 < ours[LIDAR] < 32 and ours[ALPHA] > 0
    # the less is seen, the less is known again
    for names in (map(own_crop, AREAS), map(overlap_measure, SHARES)):
        shares = [ours[name] for name in names]
        assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert [row.encoder for row in report.quoted] == ["tiny", "untrained", "raw pixels"]
    assert report.n_test == 100 and "100 of 360 test images" in report.method


def test_the_rows_are_those_of_the_function_and_of_what_extract_gives(report: Evaluation, tiny_encoder: Path) -> None:
    vit, card = load_encoder_file(tiny_encoder)
    test = open_data("digits").test
    rows = label_free_rows("tiny", vit, card, test, ON, images=100)
    assert numbers(rows) == numbers(row for row in report.results if row.encoder == "tiny")
    twin = label_free_rows("untrained", untrained_twin(card, seed=0)[0], card, test, ON, images=100)
    assert numbers(twin) == numbers(row for row in report.results if row.encoder == "untrained")
    some = drawn_images(test, 100, 0)
    assert values(report, "tiny")[RANKME] == effective_rank(extract(vit, card, some, device="cpu").pooled("mean"))


def test_neither_labels_nor_the_batch_size_count_and_the_seed_does(tiny_encoder: Path) -> None:
    vit, card = load_encoder_file(tiny_encoder)
    test = open_data("digits").test.subset(range(60))
    rows = label_free_rows("tiny", vit, card, test, ON)
    test.labels = None
    again = label_free_rows("tiny", vit, card, test, EvalSettings(device="cpu", batch_size=7))
    for row, other in zip(rows, again, strict=True):
        assert row.value == pytest.approx(other.value, rel=1e-4) and row.settings == other.settings
    other = label_free_rows("tiny", vit, card, test, EvalSettings(device="cpu", seed=1))
    assert rows[0].value == other[0].value  # the same 60 whole images
    assert all(row.value != again.value for row, again in zip(rows[2:], other[2:], strict=True) if row.value < 0.9)


def test_what_cannot_be_read_is_left_out(tiny_encoder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(40):
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{i:02}.png")
    (tmp_path / "20.png").write_bytes(b"broken")
    vit, card = load_encoder_file(tiny_encoder)
    source = open_data(str(tmp_path)).train
    rows = label_free_rows("tiny", vit, card, source, ON)
    assert {len(row.outcomes.values) for row in rows if row.outcomes is not None} == {39}
    assert {row.measure: row.value for row in rows}[own_crop(0.9)] > 0.5  # crops and images still agree
    for i in range(10):
        (tmp_path / f"{i:02}.png").write_bytes(b"broken")
    assert "29 test images" in refusal(label_free_rows, "tiny", vit, card, source, ON)
    assert "32 or more" in refusal(evaluate, "label-free", tiny_encoder, "digits", device="cpu", images=31)


def test_recordings_have_no_crops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Tones(4), Tones(12, first=1000)))
    report = evaluate("label-free", encoder_of_sound(tmp_path / "ear"), "tones", device="cpu")
    measures = (RANKME, ALPHA, IDEST, DSE, SEPARATION, DENSE_DIMENSIONS, *map(overlap_measure, SHARES))
    assert tuple(values(report, "ear")) == tuple(values(report, "untrained")) == measures
    assert tuple(values(report, "chance")) == tuple(map(overlap_measure, SHARES)) and report.n_test == 36
    assert "image" not in report.text(200) and "pixels" not in report.text(200)


def test_a_swin_has_no_row_of_patches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, path = spec_of(channels=1), tmp_path / "swin.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.3,), (0.37,), "mae", "windows"), path)
    report = evaluate("label-free", path, "digits", device="cpu", images=40)
    assert tuple(values(report, "windows")) == (*[*MEASURES][:7], *map(own_crop, AREAS))
