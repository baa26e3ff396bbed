"""What a run goes on from: the checkpoints it writes, the newest sound one, and the one to which it goes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.processes import collected, total
from patchloom.runs.checkpoint import as_best, finite, restore, tensors_of
from patchloom.runs.folder import RunFolder
from patchloom.train.progress import Reporter
from patchloom.train.state import TrainState
from patchloom.train.step import Forward, Stepper, Update

_MAX_SETBACKS = 3  # how often a run goes back


def save_checkpoint(folder: RunFolder, stepper: Stepper, state: TrainState, unreadable: set[str]) -> bool:
    """Write a checkpoint, and what is read beside it. Every process must call it, and the first one writes.

    Args:
        folder: of the run.
        stepper: has the task and the optimiser.
        state: what else the run remembers.
        unreadable: files that this process could not read; those that are noted in the folder are removed.

    Returns:
        Whether the weights are finite; if not, what is on the disc stays.
    """
    spoilt = not finite(stepper.task.parameters())
    if total(torch.tensor([spoilt], dtype=torch.float32, device=stepper.fabric.device)).item():
        return False
    tensors = tensors_of(stepper.task, stepper.optimizer.optimizer)
    names = collected(sorted(unreadable))
    unreadable.clear()
    if stepper.fabric.is_global_zero:
        folder.note_unreadable(names)  # first: what the checkpoint has behind it is not met again
        folder.checkpoints.save(tensors | as_best(state.best.weights), state.plain())
        folder.write_metrics(state.rows)
    return True


def restored_state(folder: RunFolder, stepper: Stepper, reporter: Reporter) -> TrainState | None:
    """Go to the newest sound checkpoint; None if there is no checkpoint.

    Raises:
        PatchloomError: there are some, and none is sound.
    """
    if not folder.checkpoints.there():
        return None
    tensors, about, problems = folder.checkpoints.read()
    restore(tensors, stepper.task, stepper.optimizer.optimizer)
    stepper.remember_statistics()
    for problem in problems:
        reporter.say(f"  {problem}: the one before it is used")
    state = TrainState.of(about, tensors)
    state.train_on(stepper.steps, folder.last_end() is not None)
    stepper.began = state.began
    return state


def go_back(
    folder: RunFolder, stepper: Stepper, state: TrainState, unreadable: set[str], reporter: Reporter
) -> TrainState:
    """Go to the last checkpoint, with half the learning rate from there on.

    Args:
        folder, stepper, state, unreadable: as for `save_checkpoint`.
        reporter: says so.

    Raises:
        PatchloomError: the run did so too often.
    """
    done, setbacks, settings = state.step, state.setbacks + 1, stepper.settings
    if setbacks > _MAX_SETBACKS:
        raise PatchloomError(
            f"loss or weights are no longer finite after {done} steps, though the learning rate was halved "
            f"{_MAX_SETBACKS} times: begin again with another --out and a lower --blr (now "
            f"{settings.blr:g}), or with --precision float32; {folder.skipped} names the images"
        )
    earlier = restored_state(folder, stepper, reporter) or TrainState()  # there is one: a run begins with a checkpoint
    earlier.setbacks, earlier.went_back = setbacks, [*state.went_back, earlier.step]
    reporter.say(
        f"  not finite any more at step {done:,}: going back to step {earlier.step:,}, with ×"
        f"{earlier.factor:g} the learning rate from there on ({setbacks} of at most {_MAX_SETBACKS} times)"
    )
    save_checkpoint(folder, stepper, earlier, unreadable)  # else a run that is killed now would forget it
    return earlier


def note_skipped(
    folder: RunFolder,
    state: TrainState,
    source: Source,
    forwards: Sequence[Forward],
    update: Update,
    reporter: Reporter,
) -> None:
    """Note that an update was not made, with the names of its images. Every process must call it.

    Args:
        folder: of the run.
        state: where the run is.
        source: the training images.
        forwards: the steps of the update.
        update: how it went.
        reporter: says so.
    """
    names = collected([source.describe(index) for one in forwards for index in one.indices.tolist()])
    why = f"loss {', '.join(f'{row[0]:g}' for row in update.values)}, norm of the gradient {update.norm:g}"
    if not reporter.loud:
        return
    folder.note_skipped("\t".join([f"step {state.step}", why, *names]))
    reporter.say(f"  step {state.step:,} was skipped: {why}; {folder.skipped} names its {len(names)} images")
