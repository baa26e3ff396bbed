"""The verdict on a run: the first of a few rules that has something to say, the figure that says so, and what to try.

The rules, with the reasons of their thresholds, are a table in docs/pretrain.md. They need what a run knows at each of
its measures, and nothing of the time, so that a run that was stopped comes to the same verdict.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from patchloom.runs.health import COLLAPSED, EARLY, HEALTHY, NOT_LEARNING, UNKNOWN, WEAK, Health
from patchloom.train.signs import Classes, Signs
from patchloom.verdict import LEAST, SMALL, Effect, Level

# Below this the images are nearly the same: what sets one apart from another, as a share of all that their pixels
# differ by. Copies of one image with noise of ±3 grey values have 0.03, the images of `shapes` 0.99, CIFAR's 0.97.
_APART = 0.05
_SOME = 16  # images; features of fewer cannot differ in many directions
# Below these the encoder gives nearly the same features to all images, or such as lie on one line: their deviation from
# their mean as a share of an untrained encoder's, and the rank without that mean, which a vector that all features have
# in common does not move. 37 ordinary runs had 0.17 to 1.22 and 5.8 to 78; `mae` on small images of four kinds,
# whose kNN was far above the untrained, 0.13 and 0.24; encoders that were made to collapse 0.02 to 0.05.
_LEAST_DEVIATION, _LEAST_RANK = 0.05, 2.0
# Growth of the gap to perfect from one measure to the next that counts as a jump, if it is also more than chance. Of
# five short runs at 100 times their learning rate four went up by 6 to 25 %, and none at its own rate by more than 1 %.
_JUMP = 0.05
# Updates before which a task that is not learnt yet says little: position tasks stood at chance for the first 250 to
# 350 of them in our short runs, and left it then.
_ENOUGH = 500


class _Found(NamedTuple):
    verdict: str
    why: str
    then: str = ""


def health_of(signs: Signs) -> Health:
    """The verdict on a run, by the first rule that speaks."""
    for rule in _RULES:
        if found := rule(signs):
            epoch = round(signs.settings.epochs * signs.step / signs.steps, 4)
            return Health(found.verdict, found.why, found.then, epoch, signs.ended)
    raise AssertionError("the last rule always speaks")


def _same_images(signs: Signs) -> _Found | None:
    apart, n = signs.latest("images:apart"), len(signs.measure.values)
    if apart is None or not apart < _APART or n < LEAST:
        return None
    why = (
        f"the {n:,} held-out images are nearly all the same: {apart:.1%} of what their pixels differ by sets them apart"
    )
    return _Found(UNKNOWN, why, "look at your data (patchloom check), and give images that differ")


def _not_finite(signs: Signs) -> _Found | None:
    spread = signs.latest("features:spread")  # as the other figures of features, nan where these are not finite
    if math.isfinite(signs.measure.value) and (spread is None or math.isfinite(spread)):
        return None
    return _Found(NOT_LEARNING, f"{signs.figure()}: something is not finite any more", _slower(signs))


def _same_features(signs: Signs) -> _Found | None:
    rank, now = signs.latest("features:centred rank"), signs.latest("features:deviation")
    if rank is None or now is None or len(signs.measure.values) < _SOME:
        return None
    untrained = signs.latest("features:deviation:untrained")
    share = None if not untrained else now / untrained
    if rank >= _LEAST_RANK and (share is None or share >= _LEAST_DEVIATION):
        return None
    if signs.tells_classes():  # then images are told apart, by however little
        return None
    differ = "" if share is None else f"they differ by {share:.1%} of what an untrained encoder's do, and "
    why = f"the encoder's features of different images are nearly the same ({differ}in {rank:.1f} directions)"
    return _Found(COLLAPSED, why, _slower(signs))


def _same_outputs(signs: Signs) -> _Found | None:
    if not signs.measure.collapsed():
        return None
    found = ", ".join(f"{name} {value:.2f}" for name, value in signs.measure.diversity.items())
    why = f"the teacher gives all images nearly the same output ({found}), so that agreement with it means little"
    if signs.classes is None or not signs.tells_classes():
        return _Found(COLLAPSED, why, _for_teacher(signs))
    why += f"; yet by kNN the features tell classes better than an untrained encoder's ({_by_knn(signs.classes)})"
    return _Found(WEAK, why, _for_teacher(signs))


def _few_images(signs: Signs) -> _Found | None:
    if signs.level is not Level.UNKNOWN or not signs.step:
        return None
    n = len(signs.measure.values)
    why = f"{signs.figure()}, on {n:,} held-out {'image' if n == 1 else 'images'}, which are too few"
    return _Found(UNKNOWN, why, "hold out more images (--held_out), or give more of them")


def _not_begun(signs: Signs) -> _Found | None:
    return None if signs.step else _Found(EARLY, f"nothing is trained yet: {signs.figure()}")


def _went_back(signs: Signs) -> _Found | None:
    if signs.learnt or not signs.setbacks:
        return None
    times = "once" if signs.setbacks == 1 else f"{signs.setbacks} times"
    return _Found(NOT_LEARNING, f"the run went back {times}, as it was not finite; {signs.figure()}", _slower(signs))


def _got_worse(signs: Signs) -> _Found | None:
    """Worse than the baseline, and by more than chance than before training: that is no matter of patience."""
    if signs.level is not Level.WORSE or not signs.worse_than_at_the_start():
        return None
    measure, start = signs.measure, next(float(row["held_out"]) for row in signs.rows if row.get("held_out"))
    why = f"{signs.figure()}: worse than before the first step ({measure.show(start)})"
    return _Found(NOT_LEARNING, why, _slower(signs))


def _unstable(signs: Signs) -> _Found | None:
    """The measure went up and down on the way, and is not better than the baseline yet."""
    if signs.learnt:
        return None
    found = signs.jump_back(_JUMP)
    if found is None:
        return None
    before, after = map(signs.measure.show, found)
    why = f"{signs.figure()}, and on the way it went from {before} back to {after}"
    return _Found(NOT_LEARNING, why, _slower(signs))


def _not_better(signs: Signs) -> _Found | None:
    if signs.learnt:
        return None
    if signs.updates < _ENOUGH:
        why = f"{signs.figure()}, after {signs.updates:,} {'update' if signs.updates == 1 else 'updates'}"
        return _Found(EARLY, why, _longer(signs) if signs.ended else "")
    if not signs.ended and signs.step < signs.steps / 2:
        return _Found(EARLY, f"{signs.figure()}, in the first half of the run")
    gained = signs.gained_since(signs.step / 2)
    if gained is None:
        return _Found(EARLY, f"{signs.figure()}, after {signs.updates:,} updates", _longer(signs))
    if _grew(gained):
        why = f"{signs.figure()}, but {gained.share:.0%} nearer to perfect than halfway"
        return _Found(EARLY, why, _longer(signs))
    if gained.level is Level.UNKNOWN:
        n = len(signs.measure.values)
        why = (
            f"{signs.figure()}; {n:,} held-out images are too few to tell whether it is nearer to perfect than halfway"
        )
        return _Found(EARLY, why, f"hold out more images (--held_out), or {_longer(signs)}")
    why = f"{signs.figure()}, after {signs.updates:,} updates, and no nearer to perfect than halfway"
    then = f"smaller patches (--patch_size), a lower --blr (now {signs.settings.blr:g}), or another --task"
    return _Found(NOT_LEARNING, why, f"look at the pictures, and at your data; {then}")


def _alike(signs: Signs) -> _Found | None:
    if not signs.measure.alike():
        return None
    why = f"{signs.figure()}: the teacher's outputs are so alike that agreeing with them says little"
    return _Found(WEAK, why, _for_teacher(signs))


def _weak(signs: Signs) -> _Found | None:
    if signs.level is Level.CLEAR:
        return None
    if signs.level is Level.UNSURE:
        n = len(signs.measure.values)
        why = f"{_share(signs)}, and {n:,} held-out images are too few to tell how well it is learnt"
        return _Found(WEAK, why, f"hold out more images (--held_out), or {_longer(signs)}")
    batch = "" if signs.measure.outputs is None else ", or with a larger --batch_size"
    return _Found(WEAK, _share(signs), f"{_longer(signs)}{batch}")


def _no_gain_in_classes(signs: Signs) -> _Found | None:
    found = signs.classes
    if found is None or found.level not in (Level.WORSE, Level.NONE):
        return None
    why = f"{signs.figure()}; but by kNN its features tell classes no better than {found.control} ({_by_knn(found)})"
    return _Found(WEAK, why, f"{_longer(signs)}, or try another --task; fine-tuning may tell more than kNN")


def _healthy(signs: Signs) -> _Found:
    if signs.classes is None:
        then = "a few labels tell what the features are good for (patchloom evaluate knn)" if signs.ended else ""
        return _Found(HEALTHY, _share(signs), then)
    if signs.classes.level is Level.UNKNOWN:
        n, control = signs.classes.images, signs.classes.control
        few = f"{n:,} labelled {'image is' if n == 1 else 'images are'} too few to tell whether its features are better"
        why = f"{_share(signs)}; {few} than {control} (kNN {_by_knn(signs.classes)})"
        return _Found(HEALTHY, why, "label more images, and ask again (patchloom evaluate knn)" if signs.ended else "")
    why = f"{_share(signs)}; kNN {_by_knn(signs.classes)}"
    gained = signs.gained_since(0.75 * signs.steps) if signs.ended else None
    grows = gained is not None and _grew(gained)
    return _Found(HEALTHY, why, f"{_longer(signs)}: it was still getting better" if grows else "")


_RULES = (
    *(_same_images, _not_finite, _not_begun, _same_features, _same_outputs, _few_images, _went_back),
    *(_got_worse, _unstable, _not_better, _alike, _weak, _no_gain_in_classes, _healthy),
)


def _grew(gained: Effect) -> bool:
    """Whether a measure came nearer to perfect by more than chance, and by more than nobody would see."""
    return gained.level.better and gained.share >= SMALL


def _share(signs: Signs) -> str:
    return f"{signs.figure()}, {signs.measure.effect().share:.0%} of the way to perfect"


def _by_knn(found: Classes) -> str:
    return f"{found.value:.1%}, {found.control} {found.other:.1%}"


def _longer(signs: Signs) -> str:
    if signs.stopped:
        return f"train longer, in another --out with more --patience (now {signs.settings.patience})"
    return f"train longer ({_more_epochs(signs)})"


def _more_epochs(signs: Signs) -> str:
    return f"--epochs {4 * signs.settings.epochs:g}"


def more_epochs(signs: Signs, health: Health) -> str:
    """Return the option by which a run is trained on, where its verdict says to; else ""."""
    return "" if signs.stopped or _longer(signs) not in health.then else _more_epochs(signs)


def _slower(signs: Signs) -> str:
    return f"lower --blr (from {signs.settings.blr:g} to {signs.settings.blr / 10:g}), or raise --warmup_epochs"


def _for_teacher(signs: Signs) -> str:
    return f"give extrema --task.loss infonce, raise --task.momentum, or {_slower(signs)}"
