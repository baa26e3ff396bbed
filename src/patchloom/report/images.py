"""Images that a run did not train on, for the parts of a page that need some: its own, or others that are given."""

from __future__ import annotations

from typing import NamedTuple

from patchloom.data import Data, DataLike, Source, is_given, lasting, open_data, open_stored
from patchloom.data.sound.hearing import heard_by
from patchloom.errors import PatchloomError
from patchloom.report.gather import Gathered
from patchloom.runs.held_out import own_held_out


class Images(NamedTuple):
    """Images for a run.

    Attributes:
        shown: that are shown, and not trained on as far as is known; None where there are none.
        train: the run's own data, to look for faults in; None where it cannot be opened, or was not asked for.
        what: what ``shown`` is, such as "held-out images of the run"; else why there are none, as a sentence.
    """

    shown: Source | None
    train: Source | None
    what: str


def images_of(run: Gathered, data: DataLike | None = None) -> Images:
    """Images for a run's page; never an error.

    Args:
        run: whose.
        data: given ones, of which the test split is taken if there is one; the run's held-out images, if absent.
    """
    try:
        if data is not None and (lasting(data) != run.settings.data or is_given(run.settings.data)):
            opened = heard_by(open_data(data), run.sound, run.name)
            return Images(opened.test or opened.train, None, f"images of {(opened.test or opened.train).name}")
        opened = _own(run, data)
        opened = heard_by(opened, run.sound, run.name)
        own = own_held_out(run.folder, run.settings, opened.train).parts(opened.train)[1]
        return Images(own, opened.train, f"held-out {own.noun} of {opened.train.name}")
    except PatchloomError as problem:
        return Images(None, None, str(problem))


def _own(run: Gathered, data: DataLike | None) -> Data:
    """The run's own data, as it is today.

    Raises:
        PatchloomError: it cannot be opened, or is what a command gives, which is run for nobody who did not type it.
    """
    if data is not None:  # it was typed, and is the same
        return open_data(run.settings.data, group=run.settings.group)
    return open_stored(run.settings.data, run.name, "give it with --data", group=run.settings.group)
