"""Scores of segmentation are those of scikit-learn on all pixels together, with intervals over images."""

import contextlib
import io
import math
import resource
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from refusing import refusal
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from patchloom.dense.annotations.base import IGNORED, Objects
from patchloom.dense.metrics import (
    DetectedObjects,
    average_precision,
    class_ious,
    confusion,
    from_run_lengths,
    interval,
    mean_iou,
    overlaps,
    pixel_accuracy,
    pseudo_precision,
    pseudo_values,
    resampled_precision,
    run_lengths,
)

K = 5


def some_maps(n: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers and truths [n h w] of four classes of five, a tenth of the pixels ignored."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, (n, 9, 7))
    predicted = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, 4, truth.shape))
    truth[rng.random(truth.shape) < 0.1] = IGNORED
    return torch.from_numpy(predicted).short(), torch.from_numpy(truth).short()


def test_scores_are_those_of_scikit_learn():
    predicted, truth = some_maps()
    matrices = torch.stack([confusion(p, t, K) for p, t in zip(predicted, truth, strict=True)])
    counted = (truth != IGNORED).numpy()
    t, p = truth.numpy()[counted], predicted.numpy()[counted]
    assert matrices.dtype == torch.int64
    assert np.array_equal(matrices.sum(0), confusion_matrix(t, p, labels=range(K)))
    found = overlaps(matrices).sum(0)
    assert class_ious(found)[:4].tolist() == pytest.approx(jaccard_score(t, p, labels=range(4), average=None))
    assert class_ious(found)[4].isnan()  # neither asked nor answered
    # class 3 is answered and never asked: it counts as 0
    assert float(mean_iou(found)) == pytest.approx(jaccard_score(t, p, labels=range(4), average="macro"))
    assert float(pixel_accuracy(found)) == pytest.approx(accuracy_score(t, p))


def test_ignored_maps_count_for_nothing_and_others_must_fit():
    found = overlaps(confusion(torch.full((2, 2), 7), torch.full((2, 2), IGNORED), K))
    assert not found.any() and mean_iou(found).isnan()
    with pytest.raises(ValueError, match="is no answer to"):
        confusion(torch.zeros(2, 2), torch.zeros(2, 3), 2)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="from 0 to 1"):
            confusion(torch.full((2, 2), wrong), torch.zeros(2, 2), 2)


def share(sums: torch.Tensor) -> torch.Tensor:
    """Of sums [... 2], the first over the second."""
    return sums[..., 0] / sums[..., 1]


def test_the_interval_of_a_mean_is_the_one_of_textbooks_also_over_groups():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(np.stack([rng.random(30), np.ones(30)], 1))
    pseudo = pseudo_values(share, values)
    assert pseudo.tolist() == pytest.approx(values[:, 0].tolist())  # of a mean they are the values themselves
    low, high = interval(values[:, 0].mean(), pseudo)
    mean, reach = values[:, 0].mean().item(), 2.0452 * values[:, 0].std().item() / math.sqrt(30)
    assert (low.item(), high.item()) == pytest.approx((mean - reach, mean + reach), abs=1e-4)
    groups = rng.permutation(np.repeat([7, 3, 9, 4, 1], 6))
    pseudo = pseudo_values(share, values, groups)
    means = [values[groups == name, 0].mean().item() for name in (1, 3, 4, 7, 9)]
    assert pseudo.tolist() == pytest.approx(means)  # of groups of one size they are the means of the groups
    low, high = interval(values[:, 0].mean(), pseudo_values(share, values, np.zeros(30)))
    assert (low, high) == (0, 1)


def test_an_image_that_alone_has_a_class_leaves_its_interval_open():
    per_image = torch.tensor([[[1, 0], [3, 0], [1, 0]], [[4, 2], [4, 2], [4, 2]], [[0, 0], [2, 0], [1, 0]]])
    low, high = interval(class_ious(per_image.sum(0)), pseudo_values(class_ious, per_image))
    assert (low[1].item(), high[1].item()) == (0, 1) and high[0] - low[0] <= 1
    one = per_image[:1]
    assert [end.tolist() for end in interval(class_ious(one.sum(0)), pseudo_values(class_ious, one))] == [
        [0, 0],
        [1, 1],
    ]


# AP is pycocotools' on random objects with crowds, and its interval is that of copied images.

CLASSES = ("cat", "dog", "eel", "fox")  # there is no fox
SIDE = 200


def drawn(boxes: np.ndarray) -> torch.Tensor:
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    x0, y0, x1, y1 = (edge[:, None, None] for edge in boxes.T)
    inside = (2 * x - x0 - x1) ** 2 / (x1 - x0) ** 2 + (2 * y - y0 - y1) ** 2 / (y1 - y0) ** 2 <= 1
    return torch.from_numpy(inside)


def some_boxes(rng: np.random.Generator, m: int) -> np.ndarray:
    corner, side = rng.random((m, 2)) * 60, 4 + rng.random((m, 2)) ** 2 * 136
    return np.concatenate([corner, corner + side], 1).astype(np.float32)


def some_images(n: int, seed: int = 0, per_image: int = 8) -> tuple[list[Objects], list[DetectedObjects]]:
    """Objects, some of them crowds, and what was found: most of it near, some twice, some of it elsewhere."""
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for i in range(n):
        m = 0 if i == 1 else int(rng.integers(1, per_image))
        boxes, labels = some_boxes(rng, m), rng.integers(0, 3, m)
        crowd = torch.from_numpy(rng.random(m) < 0.2)
        truth.append(Objects(torch.from_numpy(boxes), torch.from_numpy(labels), drawn(boxes), crowd))
        again = rng.integers(0, m, 2 * m) if m else np.zeros(0, int)
        near = boxes[again] + rng.normal(0, 3, (len(again), 4)).astype(np.float32)
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
        wrong = some_boxes(rng, 3)
        answered = np.concatenate([near, wrong]).astype(np.float32)
        named = np.concatenate([labels[again], rng.integers(0, 4, 3)])
        named = np.where(rng.random(len(named)) < 0.1, 0, named)
        scores = torch.from_numpy(rng.integers(1, 40, len(named)) / 40).float()  # many are equal
        masks = run_lengths(drawn(answered))
        found.append(DetectedObjects(torch.from_numpy(answered), torch.from_numpy(named), scores, masks))
    return truth, found


def by_pycocotools(truth: list[Objects], found: list[DetectedObjects], kind: str) -> COCOeval:
    def sides(box: torch.Tensor) -> list[float]:
        return [*box[:2].tolist(), *(box[2:].double() - box[:2].double()).tolist()]

    there, results = [], []
    for i, (objects, answer) in enumerate(zip(truth, found, strict=True)):
        for box, label, mask, crowd in zip(objects.boxes, objects.labels, objects.masks, objects.crowd, strict=True):
            about = {"id": len(there) + 1, "image_id": i, "category_id": int(label), "iscrowd": int(crowd)}
            about["segmentation"] = coco_mask.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
            there.append(about | {"bbox": sides(box), "area": int(mask.sum())})
        for m, (box, label, score) in enumerate(zip(answer.boxes, answer.labels, answer.scores, strict=True)):
            about = {"image_id": i, "category_id": int(label), "score": float(score)}
            results.append(about | ({"bbox": sides(box)} if kind == "bbox" else {"segmentation": answer.masks[m]}))
    with contextlib.redirect_stdout(io.StringIO()):
        gt = COCO()
        categories = [{"id": k, "name": name} for k, name in enumerate(CLASSES)]
        images = [{"id": i, "height": SIDE, "width": SIDE} for i in range(len(truth))]
        gt.dataset = {"images": images, "annotations": there, "categories": categories, "info": {}}
        gt.createIndex()
        run = COCOeval(gt, gt.loadRes(results), kind)
        run.evaluate(), run.accumulate(), run.summarize()
    return run


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_every_number_is_pycocotools(kind):
    truth, found = some_images(30)
    mine, theirs = average_precision(truth, found, CLASSES, kind), by_pycocotools(truth, found, kind)
    assert 0.05 < mine.ap < mine.means["AP50"] < 0.95
    assert list(mine.means.values()) == pytest.approx(theirs.stats[:6].tolist(), abs=1e-9)
    each = theirs.eval["precision"][:, :, :3, 0, -1].mean((0, 1)).tolist()
    assert mine.classes[:3] == pytest.approx(each, abs=1e-9) and math.isnan(mine.classes[3])
    assert list(mine.by_class(CLASSES)) == ["cat", "dog", "eel"]
    whole = torch.ones(1, 30, dtype=torch.float64)
    assert float(resampled_precision(mine.matches, whole)) == pytest.approx(mine.ap, abs=1e-9)


def test_classes_and_sizes_without_objects_have_no_number_and_missed_objects_0():
    box = torch.tensor([[0.0, 0, 10, 10]])
    truth = Objects(box, torch.tensor([1]), None, torch.zeros(1, dtype=torch.bool))
    answer = DetectedObjects(box, torch.tensor([1]), torch.ones(1))
    precision = average_precision([truth], [answer], CLASSES, "bbox")
    assert precision.means == {"AP": 1, "AP50": 1, "AP75": 1, "APs": 1}
    assert precision.by_class(CLASSES) == {"dog": 1}
    truth, found = some_images(4)
    precision = average_precision(truth, [one.above(2.0) for one in found], CLASSES, "bbox")
    assert set(precision.means.values()) == {0} and not pseudo_precision(precision.matches).any()


def test_a_long_list_of_classes_costs_nothing():
    """As a stranger's list of names may be: it took 8 GB for those that no object has."""
    truth, found = some_images(6, seed=2)
    few = average_precision(truth, found, CLASSES, "bbox")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many = average_precision(truth, found, [*CLASSES, *map(str, range(20_000))], "bbox")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "in KiB"
    assert many.means == few.means and len(many.classes) == 20_004
    np.testing.assert_array_equal(many.classes[:4], few.classes)
    assert torch.equal(pseudo_precision(many.matches), pseudo_precision(few.matches))


def without_ties(n: int, seed: int) -> tuple[list[Objects], list[DetectedObjects]]:
    """Return `some_images` with different scores: detections of equal ones may stand in another order."""
    truth, found = some_images(n, seed)
    for i, answer in enumerate(found):
        answer.scores[:] += torch.arange(len(answer)) / 1e4 + i / 1e6
    return truth, found


def precision_of(truth: list, found: list, chosen: list[int]) -> float:
    return average_precision([truth[i] for i in chosen], [found[i] for i in chosen], CLASSES, "bbox").ap


def test_a_draw_is_as_if_the_images_were_copied():
    truth, found = without_ties(12, seed=3)
    matches = average_precision(truth, found, CLASSES, "bbox").matches
    times = torch.from_numpy(np.random.default_rng(5).multinomial(12, np.full(12, 1 / 12), 4)).double()
    for row, ap in zip(times.long(), resampled_precision(matches, times).tolist(), strict=True):
        copies = torch.arange(12).repeat_interleave(row).tolist()
        assert ap == pytest.approx(precision_of(truth, found, copies), abs=1e-9)


def test_a_pseudo_value_is_of_an_image_or_a_group_that_is_left_out():
    truth, found = without_ties(12, seed=1)
    precision = average_precision(truth, found, CLASSES, "bbox")
    pseudo = pseudo_precision(precision.matches)
    for i in (0, 7):
        without = precision_of(truth, found, [k for k in range(12) if k != i])
        assert pseudo[i].item() == pytest.approx(12 * precision.ap - 11 * without, abs=1e-9)
    films = np.arange(12) // 4 + 5
    pseudo = pseudo_precision(precision.matches, films)
    without = precision_of(truth, found, [k for k in range(12) if films[k] != 6])
    assert len(pseudo) == 3 and pseudo[1].item() == pytest.approx(3 * precision.ap - 2 * without, abs=1e-9)


def test_many_images_are_left_out_in_groups():
    truth, found = some_images(40, seed=1)
    whole = average_precision(truth * 10, found * 10, CLASSES, "bbox")
    pseudo = pseudo_precision(whole.matches)
    assert len(pseudo) == 200 and pseudo.mean().item() == pytest.approx(whole.ap, abs=0.01)


def test_answers_that_do_not_fit_are_rejected(monkeypatch):
    truth, found = some_images(3)
    with pytest.raises(ValueError, match="2 answers to 3 images"):
        average_precision(truth, found[:2], CLASSES, "bbox")
    boxes = DetectedObjects(found[0].boxes, found[0].labels, found[0].scores)
    with pytest.raises(ValueError, match="the answer has no masks"):
        average_precision(truth[:1], [boxes], CLASSES, "segm")
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core.coco", None)
    assert r"pip install 'faster-coco-eval" in refusal(average_precision, truth, found, CLASSES, "bbox")


def test_run_lengths_come_back():
    masks = drawn(some_boxes(np.random.default_rng(0), 3))
    assert torch.equal(from_run_lengths(run_lengths(masks), (SIDE, SIDE)), masks)
    assert from_run_lengths(run_lengths(masks[:0]), (4, 5)).shape == (0, 4, 5)


def test_found_objects_are_drawn_with_their_masks_if_they_have_any():
    _, (found,) = some_images(1)
    drawn_masks = found.objects((SIDE, SIDE)).masks
    assert torch.equal(drawn_masks, from_run_lengths(found.masks, (SIDE, SIDE)))
    assert replace(found, masks=None).objects((SIDE, SIDE)).masks is None
