"""End of a run: encoder file, pictures, final evaluation, verdict and closing sentence.

All of it is idempotent: a run that is killed here repeats it when it is resumed, without duplicate results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from patchloom.data.source import Data, Source
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import has_labels, only_labelled
from patchloom.evaluate.frozen import FrozenStudy
from patchloom.evaluate.protocols.attentive import (
    attentive_report,
    encoder_products,
    memory_shortfall,
    probe_products,
    small_plan,
)
from patchloom.evaluate.protocols.knn import knn_report
from patchloom.evaluate.protocols.linear import knn_and_linear, linear_report
from patchloom.evaluate.settings import OWN_TEST, EvalSettings, Parts, Subject, Subjects, with_controls
from patchloom.loggers.base import FinalResult
from patchloom.loggers.queue import TrackerSet
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder, save_extra_module
from patchloom.nets.heads import Use
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.questions.question import Measure
from patchloom.results import store
from patchloom.results.claims import OF_TEACHER
from patchloom.results.evaluation import Evaluation
from patchloom.results.verdict import Signs, closing_sentence, judge, no_labels, write_health
from patchloom.runs.encoder import load_start
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import HeldOut, note_test_overlap
from patchloom.runs.settings import ResolvedSettings
from patchloom.runs.training_set import digest_of_record
from patchloom.system.files import write_whole
from patchloom.train.checkpointing import TrainState, describe_best
from patchloom.train.metrics import Reporter, draw_run
from patchloom.train.validation import Validation, instance_head
from patchloom.train.verdict import VerdictInputs, final_knn

_MAX_EVALUATED = 5000  # training images of the final evaluation; `patchloom evaluate` takes all
_ATTENTIVE_SHARE = 0.02  # largest work of the attentive probe over that of the run, in counted products


class FinalEvaluation(NamedTuple):
    """Final evaluation of a run.

    Attributes:
        validation: validation, with the trained task and the held-out images.
        card: card of the encoder.
        folder: folder of the run.
        reporter: printer and log.
        data: all images, as opened.
        training: training images.
        held_out: held-out split.
        settings: resolved settings.
        tracks: trackers that receive the result.
    """

    validation: Validation
    card: EncoderCard
    folder: RunFolder
    reporter: Reporter
    data: Data
    training: Source
    held_out: HeldOut
    settings: ResolvedSettings
    tracks: TrackerSet

    def run(
        self,
        measure: Measure | None,
        state: TrainState,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> str:
        """Write the encoder, draw the pictures, evaluate the features, and return the closing sentence."""
        validation, folder, task = self.validation, self.folder, self.validation.task
        extra, averages = task.extra_modules(), task.teacher_modules()
        folder.check_lock()
        best, place = state.best, (1, 1)
        weights = "" if self.settings.patience is None else describe_best(best, state.step, state.steps, self.settings)
        if best.chosen:
            place = best.step, state.steps
            measure = measure if best.step == state.step else None  # it belongs to the last weights
        card = replace(self.card, trained_on=digest_of_record(folder.trained_on), note=weights)
        if averages:
            average = cast(Encoder, averages.pop("encoder"))
            _save_with_modules(average, replace(card, name=card.name + OF_TEACHER), averages, folder.teacher)
        _save_with_modules(task.encoder, card, extra, folder.encoder)
        pictures: list[Path] = []
        if not len(validation.held_out):
            measure = None
        else:
            measure = measure or validation.run(device, precision)[0]
            pictures = draw_run(validation, folder, self.settings, measure, place, device)
        folder.note_unreadable(sorted(validation.unreadable))
        if count := len(folder.unreadable_names()):
            files = "file" if count == 1 else "files"
            self.reporter.say(f"{count} {files} could not be read: see {folder.unreadable}.")
        reports = self._evaluate() if validation.gallery is not None else ()
        knn = reports[0] if reports else None
        health = None
        if measure is None:
            summary = f"Trained on all {len(self.training):,} {self.training.noun}, so nothing was measured on others."
            if not task.measured:
                summary = f"Trained with a bare loss, which has no measure: there is no verdict. {summary}"
        else:
            signs = self._signs(measure, state, knn)
            health = judge(signs)
            self.reporter.say(f"Verdict: {health}")
            if "epochs" in health.actions and (command := folder.command()):
                self.reporter.say(f"  to train longer: {command} --epochs {health.actions['epochs']:g}")
            named, doubt = self.held_out.named(signs.measure.noun), bool(self.held_out.doubt)
            summary = f"{closing_sentence(signs, named, doubt)} {weights}".strip()
        self.reporter.say(summary)
        if measure is not None and knn is None:
            self.reporter.say(no_labels(self.training.noun))
        also = "".join(f", with {name}.safetensors beside it" for name in extra)
        also += f". Teacher: {folder.teacher}" if folder.teacher.is_file() else ""
        drawn = f"Pictures: {folder.pictures}. " if pictures else ""
        self.reporter.say(f"{drawn}Encoder: {folder.encoder}{also}.")
        folder.check_lock()
        if health is not None:
            write_health(folder.path, health)
        # before summary.txt: a run that is killed while trackers take the result sends the rest later
        images = [file.name for file in pictures]
        verdict = "" if health is None else str(health)
        quoted = [row for one in reports for row in one.quoted]
        self.tracks.log_result(FinalResult(state.step, verdict, summary, quoted, images, health))
        write_whole(folder.summary, summary + "\n")
        return summary

    def _signs(self, measure: Measure, state: TrainState, knn: Evaluation | None) -> Signs:
        """Return the signs by which the run is judged, up to the weights that it ends with."""
        done, best = state.step, state.best
        rows = [row for row in state.rows if not best.chosen or int(row["step"]) <= best.step]
        so_far = VerdictInputs(measure, rows, state.results, self.settings, done, done, state.setbacks)
        stopped = best.chosen and done < state.steps
        of_classes = None if knn is None else final_knn(knn)
        return so_far._replace(knn=of_classes, ended=True, stopped=stopped, modality=self.card.modality).signs()

    def _evaluate(self) -> tuple[Evaluation, ...]:
        """Evaluate kNN, a linear and an attentive probe, with their controls, on images that were not trained on."""
        if self.data.test is not None and has_labels(self.data.test):
            test = only_labelled(self.data.test)
            doubt = note_test_overlap(self.folder, self.settings, test)
            story, origin = f"The test images are the test split of the data.{doubt}", OWN_TEST
        else:
            test, story = only_labelled(self.validation.held_out), self.held_out.sentence("The test images")
            doubt, origin = story if self.held_out.doubt else "", f"the {test.noun} that this run held out"
        train = self.training
        if len(train) > _MAX_EVALUATED:
            some = np.random.default_rng(self.settings.seed).permutation(len(train))[:_MAX_EVALUATED]
            train, story = train.subset(np.sort(some)), f"{story} The training images are a random subset."
        parts = Parts(only_labelled(train), test, story, origin=origin)
        seed, task, validation = self.settings.seed, self.validation.task, self.validation
        device = str(next(task.parameters()).device)
        # evaluated only once, so no cache
        evaluation = EvalSettings(
            seed=seed, device=device, batch_size=validation.batch_size, workers=validation.workers, cache=False
        )
        ours = Subject(self.card.name, task.encoder, self.card, instance_head(task))
        subjects = with_controls(ours, load_start(self.folder.path), seed)
        study = FrozenStudy("", subjects, parts, evaluation)
        near, probed, gallery, tested = knn_and_linear(study.each(), parts, evaluation)
        around = study.around(gallery, tested, instance=ours.head is not None)
        knn = knn_report(near, parts, evaluation, gallery, tested, around)
        linear = linear_report(probed, parts, evaluation, gallery, tested, around)
        reports = [knn, linear, *self._attentive(subjects, parts, evaluation)]
        if self.settings.group is not None:
            reports = [one.with_setting("group", self.settings.group) for one in reports]
        for report in reports:
            self.folder.check_lock()
            store.append(self.folder.path, report.results, once=True)
            self.reporter.say(f"{report.headline} {report.conclusion()}")
        if doubt:
            self.reporter.say(f"  {doubt.strip()}")
        return tuple(reports)

    def _attentive(self, subjects: Subjects, parts: Parts[Source], settings: EvalSettings) -> list[Evaluation]:
        """Return the report of an attentive probe; [] with a printed reason if it is left out.

        Its work is counted, not timed, so that equal runs end alike: products of the encoder on whole images.
        """
        vit, train, why = subjects.ours.vit, parts.train, ""
        trained = [subjects.ours, *subjects.controls]
        if is_hierarchical(vit):
            why = "a Swin has none"
        elif not (why := memory_shortfall(vit, len(train), train.noun)):
            try:
                plan = small_plan(vit, parts, settings)
            except PatchloomError as problem:
                why = str(problem)
            else:
                work = len(trained) * probe_products(vit, plan)
                run = 3 * self.settings.epochs * len(self.training) * encoder_products(vit)
                if work > _ATTENTIVE_SHARE * run:
                    why = f"its work is {work / run:.0%} of the run's, more than {_ATTENTIVE_SHARE:.0%}"
        if why:
            self.reporter.say(f"No attentive probe: {why} (patchloom evaluate attentive {self.folder.path} DATA).")
            return []
        return [attentive_report(trained, plan, "auto", quiet=True)[0]]


def _save_with_modules(encoder: Encoder, card: EncoderCard, modules: dict[str, nn.Module], path: Path) -> None:
    """Write an encoder and the modules beside it, which its card names."""
    for name, module in modules.items():
        save_extra_module(module, path.with_name(f"{name}.safetensors"))
    uses = {name: cast(Use, module.use) for name, module in modules.items()}
    save_encoder(encoder, replace(card, extra_modules=uses), path)
