"""kNN accuracy of the mean patch token of every layer (MP3's layer-wise evaluation)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError
from patchloom.evaluate.answers import constant_answers, results_of_answers
from patchloom.evaluate.features import FeatureOptions, ImageFeatures
from patchloom.evaluate.frozen import INSTEAD, circumstances, extractors, plan_frozen
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, hold_out_for_choice
from patchloom.evaluate.protocols.knn import TEMPERATURE, knn_accuracies, knn_answers
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.evaluate.subjects import open_subjects
from patchloom.look.charts import draw_layers
from patchloom.nets.checkpoints.live import has_no_folder
from patchloom.nets.swin import refuse_hierarchical
from patchloom.options.protocols import Layers
from patchloom.results.classes import called, explain_measure, headline_row
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.results.result import ACCURACY, Result


def layers(run: str | Path, data: DataLike, settings: EvalSettings, options: Layers) -> Evaluation:
    """Classify by the nearest neighbours among training images, with the features of every layer.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder or data, or data without labels.
    """
    k, features = options.k, FeatureOptions(options.test_crop)
    subjects = open_subjects(run, settings)
    refuse_hierarchical(subjects.ours.vit, "layers", INSTEAD)
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    features.check(parts.test)
    plan_frozen("layers", subjects, parts, settings)

    # ---- accuracies of each layer of each encoder
    groups: list[list[Result]] = []
    beside: list[Result] = []
    cached = []
    for one in extractors(subjects, settings, layers=True, options=features):
        train, raw = one.features_of(parts.train), one.subject is None
        row_settings = [{}] if raw else _held_out(train, k, settings)
        # the best layer is chosen: read the test images
        test = one.features_of(parts.test)
        pooling, found = "pixels" if raw else "mean", []
        for values, queries, about in zip(train.tokens.values(), test.tokens.values(), row_settings, strict=True):
            answers, _ = knn_answers(values, train.labels, queries, (k,), device=settings.torch_device)[k]
            about = {"pooling": pooling, "k": k, "temperature": TEMPERATURE, **about, **features.plain()}
            its = one.name, "layers", about, parts.test, settings, test.labels, answers, None, test.groups
            made = results_of_answers(*its, quoted=False)
            found.append(headline_row(made, test.labels))
            if found[-1].measure != ACCURACY:
                beside += [row for row in made if row.measure == ACCURACY]
        groups.append(found)
        cached += [one.name] * (train.cached or test.cached)

    # ---- the report
    ours, *starts, twins, (pixels,) = groups
    n_test = len(test.labels)
    guessed = headline_row(constant_answers("layers", test.labels, parts.test, test.groups), test.labels)
    last, best, twin, twins_best = ours[-1], _best(ours), twins[-1], _best(twins)
    quoted = (last, best, twin, twins_best, pixels, *(its[-1] for its in starts))
    pairs = (*range(5, len(quoted)), 2)  # in the last layer: start, untrained
    method = (
        f"Layers: mean of the patch tokens before the blocks, after each of {len(ours) - 2} blocks and after the final "
        f"norm, in one pass; in each layer the {k} most similar of {len(train.labels):,} training {train.noun} vote "
        f"for each of {n_test:,} test {test.noun} (kNN by cosine similarity, votes weighted by exp(similarity / "
        f"{TEMPERATURE})). The best layer was chosen by the same vote on a stratified "
        f"{100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {train.noun}, with votes of the rest, without the test "
        f"{test.noun}. {circumstances(subjects, parts, train, test, cached, features)}"
    )
    method += f" {explain_measure(test.labels.numpy(), parts.test.classes, test.noun)}"
    if starts:
        method += " Start: the weights that the run began with, with their own normalisation."
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        n_test,
        results=[*ours, *sum(starts, []), *twins, pixels, guessed, *beside],
        method=method,
        headline=f"Layers (kNN, k={k}, mean): last layer {called(last)}{last.text()} against {twin.number()} "
        f"untrained; best layer by held-out training {test.noun}, {best.settings['layer']}, {best.text()} against "
        f"{twins_best.number()} untrained ({twins_best.settings['layer']}); {pixels.encoder} {pixels.number()}; on "
        f"{n_test:,} test {test.noun}.",
        quoted=quoted,
        across="layer",
        down=True,
        drawings=_drawings(run, options.out, ours, [twins, *starts], [pixels, guessed]),
    ).with_differences(False, *pairs)


def _held_out(train: ImageFeatures, k: int, settings: EvalSettings) -> list[dict[str, Any]]:
    """Return each layer's name and kNN accuracy on held-out training images, with the others as the gallery."""
    if len(train.labels) < 2:
        raise PatchloomError("the best layer is chosen on held-out training images: add a second training image")
    rest, held = hold_out_for_choice(train.labels, settings.seed, train.groups)
    labels, device, rows = train.labels, settings.torch_device, list[dict[str, Any]]()
    for layer, values in train.tokens.items():
        found = knn_accuracies(values[rest], labels[rest], values[held], labels[held], (k,), device=device)
        rows.append({"layer": layer, "held_out_accuracy": found[k], "held_out": len(held)})
    return rows


def _best(rows: list[Result]) -> Result:
    """Return the layer with the best accuracy on held-out training images; ties go to the first."""
    return max(rows, key=lambda row: row.settings["held_out_accuracy"])


def _drawings(
    run: str | Path, out: str | Path | None, ours: list[Result], controls: list[list[Result]], baselines: list[Result]
) -> tuple[Drawing, ...]:
    if out is None:
        if has_no_folder(run) or not Path(run).is_dir():
            return ()
        out = Path(run) / "pictures" / "layers.png"
    content = {
        "layers": [row.settings["layer"] for row in ours],
        "values": [(row.value, row.low, row.high) for row in ours],
        "controls": {its[0].encoder: [row.value for row in its] for its in controls},
        "baselines": {row.encoder: row.value for row in baselines},
        "best": ours.index(_best(ours)),
        "name": ours[0].encoder,
        "note": f"{ours[0].measure} of {ours[0].settings['k']} nearest neighbours, mean patch token, 95 % interval",
    }
    return (Drawing(draw_layers, Path(out), content),)
