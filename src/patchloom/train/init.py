"""Initial weights of a run: random ones, those of another run, or published ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import timm
from torch import Tensor

from patchloom.data.source import Source
from patchloom.data.stats import channels_of
from patchloom.display import is_first
from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder, outline
from patchloom.nets.checkpoints.fit import LoadedWeights, inherit, load_published
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.checkpoints.origin import Weights, public_shape, shape_of, statistics_in_words
from patchloom.nets.checkpoints.programs import MeanStd
from patchloom.nets.finetune import frozen_names
from patchloom.nets.swin import Encoder
from patchloom.nets.teacher import FrozenTeacher
from patchloom.questions.identity import ImageHead
from patchloom.results.claims import START
from patchloom.runs.encoder import check_place, encoder_weights, unfinished_run
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.runs.task import newest_card, run_card
from patchloom.tasks.custom import same_task
from patchloom.tasks.task import Task

_ENCODER, _ANCHOR = "encoder.", "anchor."


class Start:
    """Initial weights that the user asked for, if any.

    Args:
        asked: settings with ``from_run`` and ``init``.

    Attributes:
        sentences: report on the weights that were loaded.
        loaded: copy of the encoder's weights as they were loaded, in the first process; empty for random ones.
    """

    def __init__(self, asked: Settings):
        self.asked = asked
        self.sentences: list[str] = []
        self.loaded: dict[str, Tensor] = {}
        self.source = asked.from_run or asked.init
        self.folder: RunFolder | None = None
        if asked.from_run is not None:
            self.folder = RunFolder(asked.from_run)
        elif asked.init is not None:
            check_place(asked.init)
            self.folder = unfinished_run(asked.init)
        # settings of the run whose checkpoint has the weights
        self.run = None if self.folder is None else self.folder.read_config()
        if self.folder is not None and not self.folder.checkpoints.there():
            raise PatchloomError(f"{self.folder.path} has no checkpoint yet: let that run train first")

    @cached_property
    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Newest checkpoint of the run, read on first use."""
        assert self.folder is not None  # only used for a run
        return self.folder.checkpoints.newest()

    def shaped(self, images: Source) -> tuple[Settings, dict[str, str]]:
        """Return the settings with sizes and model of the weights instead of ``auto``, and the reasons.

        Grey and colour images are converted to the channels of the weights. For other ``images`` ``channels`` stays
        ``auto``, and the weights are adapted.
        """
        asked = self.asked
        chosen: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        shape = None
        if self.run is not None:
            shape = shape_of(self.run.encoder_spec(), "img_size", "channels")
        elif asked.init is not None:
            shape = public_shape(self._weights, asked.model["name"])
        if shape is None:
            return asked, reasons
        if "channels" in shape and asked.channels == "auto" and images.sound is None:
            there = channels_of(images)
            if there != shape["channels"] and {there, shape["channels"]} != {1, 3}:
                del shape["channels"]
        by_name = self.run is None and self._weights.kind == "bare" and asked.model["name"] != "auto"
        for name in ("patch_size", "positions", "img_size", "channels"):
            if name in shape and getattr(asked, name) == "auto":
                # a fixed table shows in the weights themselves, and no model of timm has one
                named = f"timm's {shape['name']}" if by_name and shape[name] != "sincos" else self.source
                chosen[name], reasons[name] = shape[name], f"as in {named}"
        if asked.model["name"] == "auto":
            given = {name: value for name, value in asked.model.items() if name != "name" and value is not None}
            chosen["model"] = {**shape["options"], **given, "name": shape["name"]}
            reasons["model"] = f"as in {self.source}"
        return replace(asked, **chosen), reasons

    @cached_property
    def _weights(self) -> Weights:
        """Weights of ``--init``, if that is not an unfinished run."""
        assert self.asked.init is not None  # checked by the callers
        return Weights(self.asked.init)

    def encoder(self, vit: Encoder) -> None:
        """Load the weights into an encoder; call it before a task is built, which may copy the encoder."""
        if self.run is not None and self.folder is not None:
            weights, about = self.checkpoint
            spec = outline(self.run.encoder_spec())
            done = load_published(vit, f"the encoder of {self.source}", encoder_weights(weights), spec)
            self._refuse_random(vit, done)
            self.sentences += done.sentences()
            if note := newest_card(self.folder, self.run, about).note:
                self.sentences.append(note)
        elif self.asked.init is not None:
            shape = self._weights.architecture
            done = load_published(vit, self._weights, task=self.asked.task["name"])
            self._refuse_random(vit, done)
            self.sentences += done.sentences()
            if shape is not None and self.asked.model["name"] == "auto":
                self.sentences.append(shape.sentence())
            found, of = self._weights.statistics(self.asked.model["name"])
            inferred = self._weights.program is not None or self._weights.kind == "bare"
            if self.asked.normalization != "init" and found is not None and inferred:
                how = f"this run uses --normalization {self.asked.normalization}"
                self.sentences.append(
                    f"As {of}, images of these weights are normalised by {statistics_in_words(*found)}; {how}."
                )
        if is_first() and self.source is not None:
            self.loaded = {name: weight.detach().clone() for name, weight in vit.state_dict().items()}

    def write(self, folder: RunFolder, card: EncoderCard) -> None:
        """Write the encoder as it was loaded, with its own normalisation, as the control of the adapted one.

        That of ``card``, which is the run's, is taken if the weights do not name theirs, or are for another number of
        channels.
        """
        if not self.loaded:
            return
        found, _ = self.normalization(len(card.mean))
        if found is not None:
            card = replace(card, mean=found[0], std=found[1])
        vit = build_encoder(card.own_spec)
        vit.load_state_dict(self.loaded)
        if self.folder is None or self.run is None:
            license = self._weights.stated.license
        else:  # that of the weights with which the run began
            license = run_card(self.run, self.folder.read_stats(), self.folder).license
        card = replace(card, name=START, task=str(self.source), trained_on="", note="", license=license)
        save_encoder(vit, card, folder.start)
        self.loaded = {}

    def _refuse_random(self, vit: Encoder, done: LoadedWeights) -> None:
        """Refuse an adaptation whose frozen weights would stay random."""
        adapt, count = self.asked.adapt, self.asked.train_blocks
        absent, kept = set(done.missing), frozen_names(vit, "all" if adapt == "auto" else adapt, count)
        if random := [name for name in kept if name in absent]:
            more = f" and {len(random) - 1} more" if len(random) > 1 else ""
            option = f"--adapt {adapt}" if count is None else f"--train_blocks {count}"
            raise PatchloomError(
                f"{done.source} has no {random[0]}{more}, and {option} would leave it random: choose an encoder "
                f"without it, or leave {option.split()[0]} out"
            )

    def normalization(self, channels: int) -> tuple[MeanStd | None, str]:
        """Return mean and deviation that normalise the images of the initial weights, and a reason.

        None if they are unknown, or are for another number of ``channels``; then the reason says so.
        """
        found: MeanStd | None = None
        if self.folder is not None:
            stats = self.folder.read_stats()
            found = stats.mean, stats.std
        elif self.asked.init is not None:
            found, _ = self._weights.statistics(self.asked.model["name"])
        if found is None:
            name = self.asked.model["name"]
            tag = f", and timm's weights of {name} differ in these" if self._by_name and timm.is_model(name) else ""
            return None, f"{self.source} does not name its mean and deviation{tag}"
        if len(found[0]) != channels:
            return None, f"{self.source} is for images of {len(found[0])} channels, not {channels}"
        of = f"timm's for {self.asked.model['name']}" if self._by_name else "as the weights were trained"
        return found, f"{of}: {statistics_in_words(*found)}"

    @property
    def _by_name(self) -> bool:
        """Whether only the name of a model tells how bare weights were trained."""
        return self.folder is None and self._weights.kind == "bare" and self._weights.program is None

    def load_task_weights(self, task: Task) -> None:
        """Load decoder, heads and teacher from a run of the same task, or from the authors' file.

        The teacher of another task stays a copy of the encoder.
        """
        if self.run is None and self.asked.init is not None and (foreign := self._weights.foreign) is not None:
            own_task = self.asked.task["name"] == foreign.program.task
            self.sentences += inherit(foreign, task, own_task, str(self.asked.init))
        if self.asked.from_run is None:
            return
        assert self.run is not None  # set with from_run
        if not same_task(self.run.task["name"], self.asked.task["name"]):
            return
        # a frozen teacher and the anchor are set by the new settings, not by the old run; a head with an output per
        # image belongs to the old images
        not_taken = FrozenTeacher, ImageHead
        names = (f"{name}." for name, one in task.named_modules() if isinstance(one, not_taken))
        left = (_ENCODER, _ANCHOR, *names)
        source = {name: weight for name, weight in self.checkpoint[0].items() if not name.startswith(left)}
        own = {name: weight for name, weight in task.state_dict().items() if not name.startswith(left)}
        own |= {name: one for name, one in task.named_buffers() if name in source}  # stored positions of a decoder
        fits = {name: source[name] for name in own if name in source and source[name].shape == own[name].shape}
        task.load_state_dict(fits, strict=False)
        if not own and not source:
            return
        missing = tuple(name for name in own if name not in fits)
        unexpected = tuple(name for name in source if name not in fits)
        found = LoadedWeights(f"the rest of {self.asked.from_run}", tuple(fits), missing, unexpected)
        self.sentences += found.sentences()
