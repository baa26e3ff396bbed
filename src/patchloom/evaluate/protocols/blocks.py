"""Non-linear probe of Beyond Masking: new transformer blocks and a linear head on a frozen encoder's tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import plan_for, train_and_test
from patchloom.evaluate.classifier import Classifier, class_names, fresh_blocks
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.select import Candidate
from patchloom.evaluate.settings import EvalSettings, parts_of, share_steps
from patchloom.evaluate.subjects import Subject, open_subjects
from patchloom.nets.finetune import with_variant
from patchloom.nets.heads import check_pooling, tokens_of
from patchloom.options.protocols import Blocks
from patchloom.results.evaluation import Evaluation

_UNUSED = {
    "layer_decay": 1.0,
    "drop_path": 0.0,
    "dropout": 0.0,
    "fresh_norm": False,  # there always is one behind the blocks
    "train_positions": False,
}  # values of a recipe that do not affect a frozen encoder


def blocks(run: str | Path, data: DataLike, settings: EvalSettings, options: Blocks) -> Evaluation:
    """Train new transformer blocks on the frozen encoder's tokens (blocks:2, blocks:4), with controls.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: as for `finetune`; no blocks, or a pooling that the encoder lacks.
    """
    count, changes = options.count, options.changes()
    if count < 1:
        raise PatchloomError(f"blocks:{count} trains no blocks: use blocks:2 or linear")
    for name in _UNUSED:
        if name in changes:
            raise PatchloomError(f"--{name} has no effect in blocks:{count}, where the encoder is frozen: leave it out")
    share_steps(settings)
    subjects = open_subjects(run, settings)
    vit = subjects.ours.vit
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    plan = plan_for(options.recipe, {**changes, **_UNUSED}, vit, parts, settings, options.precision)
    check_pooling(plan.recipe.pooling, tokens_of(vit, None))
    classes = len(class_names(parts.train))

    def build(subject: Subject, recipe: Recipe) -> Classifier:
        encoder = with_variant(subject.vit, subject.card)
        return Classifier(encoder, classes, recipe.pooling, body=fresh_blocks(subject.vit, count))

    trained = [subjects.ours, *(subjects.controls if options.control else [])]
    candidates = [Candidate(one.name, one.card, partial(build, one), {"blocks": count}) for one in trained]
    title = f"{count} block{'s'[: count > 1]}"
    done = (
        f"Non-linear probe: {title} of a transformer, a norm and a linear head, newly initialised, were trained on the "
        "tokens of the frozen encoder."
    )
    return train_and_test(f"blocks:{count}", f"Probe of {title}", done, candidates, plan, options.precision)
