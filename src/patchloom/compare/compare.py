"""``compare``: pre-train by several tasks for equal time and compare the encoders."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from patchloom.compare.outcome import Comparison, compare_labelled, note_unequal, training_table
from patchloom.compare.plan import Arm, ComparisonPlan, new_plan, store, stored_plan, tasks_of
from patchloom.compare.runner import OVERHEAD, Job, lock_folder, read_trained, run_all
from patchloom.compare.scores import RECIPE, all_scores, contenders, labelled_parts, with_attentive
from patchloom.compare.stored import compare_stored, find_runs
from patchloom.compare.unlabelled import compare_unlabelled, note_too_few_images
from patchloom.data.source import Data
from patchloom.data.sources.in_memory import is_object
from patchloom.data.sources.open import open_data, split_names
from patchloom.display import StatusMessage, duration, print_line
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import count_classes, only_labelled
from patchloom.evaluate.recipes import RECIPES
from patchloom.evaluate.settings import EvalSettings
from patchloom.loggers.trackers import check_installed, parse_trackers
from patchloom.nets.build import stock_encoder
from patchloom.nets.checkpoints.format import is_on_hub
from patchloom.nets.checkpoints.origin import Weights
from patchloom.options.declare import verb
from patchloom.options.verbs import Compare
from patchloom.report.page import Table, render
from patchloom.report.report import page_of
from patchloom.runs.encoder import check_place
from patchloom.runs.folder import RunFolder, data_slug
from patchloom.runs.held_out import unchanged_held_out
from patchloom.system.files import write_whole
from patchloom.tasks import TASKS


def write_page(found: Comparison, folder: Path, jobs: Sequence[Job]) -> None:
    """Write ``report.html``: verdict and tables, and the run of the first seed of each trained task, the best first."""
    folders = {job.task: job.folder for job in reversed(jobs) if job.finished}
    page = page_of([folders[task] for task in dict.fromkeys((*found.order, *folders)) if task in folders])
    tables = [Table(title, grid.heading, grid.rows, note) for title, grid, note in found.tables]
    page = replace(
        page,
        title=f"Comparison {folder.name}",
        lead=found.verdict,
        tone="good" if found.winner else "plain",
        tables=[*tables, Table("What was compared", ("", ""), list(found.about))],
        notes=[*found.notes, *page.notes],
    )
    with StatusMessage("writing the page"):
        write_whole(folder / "report.html", render(page))


def _print_result(job: Job, seconds: float) -> None:
    if job.failure:
        print_line(f"  {job.name} failed after {duration(seconds)}: {job.failure} (full log: {job.log})")
    else:
        print_line(f"  {job.name}: {read_trained(job).text}, {duration(seconds)} in all")


DRY = "Dry run: nothing was trained or written."
_LABELLED = 5000  # maximal number of training images for scoring the encoders


@verb(Compare)
def compare(options: Compare) -> Comparison:
    """Pre-train by several tasks for equal time and compare the encoders, with confidence intervals.

    Given the folders of runs instead of images, it trains nothing: it compares their stored results, image by image.

    Returns:
        The comparison: verdict, tables and path of the report.

    Raises:
        PatchloomError: invalid arguments or data; the message says how to correct them.
    """
    if runs := find_runs(options.data):
        usual = Compare(options.data)
        given_too = [one.name for one in fields(options) if getattr(options, one.name) != getattr(usual, one.name)]
        if given_too:
            raise PatchloomError(f"--{given_too[0]} is for training, and {runs[0]} is a run: leave it out")
        return compare_stored(runs)

    # ---- request
    asked = _checked(options)
    labels, recipe = asked.labels, str(asked.finetune or "")
    folder = Path(asked.out or Path("comparisons") / data_slug(asked.data))
    devices = list[str]()  # numbers of the GPUs that simultaneous runs share; none if one run uses them all
    if asked.parallel > 1 and asked.device != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    with StatusMessage("listing the images"):
        opened = open_data(asked.data, group=asked.group)
        other = None if labels is None else open_data(labels, group=asked.group)  # errors in it are reported early
    if other is not None and count_classes(only_labelled(other.train)) < 2:
        raise PatchloomError(f"--labels {labels} has one class only: add images of another class")
    settings = EvalSettings(device=asked.device or "auto", max_train=_LABELLED, group=asked.group)

    # ---- lock of the folder, after a check that it is free for this comparison
    stored_plan(asked, folder)
    with contextlib.nullcontext() if asked.dry_run else lock_folder(folder):
        # ---- plan: stored by an interrupted comparison, or new
        plan = stored_plan(asked, folder)
        if plan is None:
            plan = new_plan(asked, opened, folder)
        for line in _describe_plan(plan, opened, folder, other):
            print_line(line)
        if asked.dry_run:
            return Comparison(folder, [DRY], [], None, planned=plan.plain(folder))
        if not plan.resumed:
            store(plan, folder)

        # ---- runs
        jobs = plan.jobs(folder)
        for job in jobs if labels is None or not all(job.finished for job in jobs) else ():
            if RunFolder(job.folder).config.exists():
                unchanged_held_out(job.folder, opened.train)
        begun, left = time.monotonic(), not all(job.finished for job in jobs)
        run_all(jobs, asked.parallel, devices, _print_result)
        failed = [f"{job.name} failed: {job.failure}" for job in jobs if job.failure]
        # means over different seeds would not be comparable
        complete = [job for job in jobs if all(one.finished for one in jobs if one.task == job.task)]
        if len({job.task for job in complete}) < 2:
            raise PatchloomError(f"fewer than two tasks could be trained: {'; '.join(failed)}")
        if left:
            print_line(f"trained in {duration(time.monotonic() - begun)}")

        # ---- scores
        first = next(job for job in jobs if job.finished)
        on = labelled_parts(opened, None if labels is None else str(labels), first.folder, settings, asked.few, recipe)
        trained = [read_trained(job) for job in complete]
        notes = [*plan.notes, *failed, *note_unequal(trained, asked.minutes)]
        drawn = on is not None and any(way.few is not None for way in on.ways)
        those = contenders(complete, asked.seeds, asked.beside, asked.seeds if drawn else 1)
        if on is None:
            found = compare_unlabelled(those, opened, first.folder, settings, folder, notes)
        else:
            on = with_attentive(on, those, settings)
            scores = all_scores(those, on, settings, folder)
            found = compare_labelled(scores, those, on, folder, [*notes, *on.notes])
        found = replace(
            found,
            about=plan.about(folder, first.folder),
            tables=[*found.tables, training_table(trained)],
            planned=plan.plain(folder),
            trained=[one._asdict() for one in trained],
        )
        write_whole(folder / "summary.txt", "\n".join(found.verdict) + "\n")
        write_page(found, folder, jobs)
        return found


def _checked(options: Compare) -> Compare:
    """Return the request with names as lists, either minutes or samples, and the recipe of a fine-tuning.

    Whatever can be refused without the images is refused here.
    """
    data, minutes = options.data, options.minutes
    if is_object(data):
        raise PatchloomError("compare starts other processes, which cannot read images in memory: give a folder")
    tasks = tasks_of(options)
    for name in tasks:
        if not isinstance(name, str):
            raise PatchloomError(
                f"compare takes names of tasks and FILE.py:CLASS, with options as in mae:blr=1e-3, not {name!r}"
            )
    words = [*map(str, split_names(data))]
    if stray := [word for word in words[1:] if word in TASKS]:
        raise PatchloomError(
            f"{listing(stray, 'and')} was read as data: separate tasks by commas, --tasks={','.join([*tasks, *stray])}"
        )
    if len(set(tasks)) < 2 or len(set(tasks)) < len(tasks):
        raise PatchloomError("--tasks needs two or more different tasks: for example --tasks mae,droppos")
    if minutes is not None and options.samples is not None:
        raise PatchloomError("--minutes and --samples both set the length of training: give one of them")
    if bad := [share for share in options.few if share <= 0 or (share > 1 and share != int(share))]:
        raise PatchloomError(f"--few {bad[0]:g} is invalid: give fractions below 1 or numbers of labels per class")
    recipe = RECIPE if options.finetune is True else options.finetune
    if recipe and recipe not in RECIPES:
        raise PatchloomError(f"--finetune {recipe}: there is no such recipe: choose {listing(RECIPES)}")
    check_installed(trackers := parse_trackers(options.log))
    beside = options.beside
    if isinstance(beside, str):
        beside = [name.strip() for name in beside.split(",") if name.strip()]
    for one in beside:
        if is_on_hub(one):
            Weights(one).encoder_spec()
        elif one.startswith("timm:"):
            stock_encoder(one.removeprefix("timm:"))
        else:
            check_place(one)
    asked = replace(
        options,
        data=words[0] if len(words) == 1 else words,
        minutes=20.0 if minutes is None and options.samples is None else minutes,
        log=",".join(trackers) or None,
        beside=beside,
        finetune=recipe,
    )
    for name in tasks:
        Arm.of(name).settings(asked)
    return asked


def _describe_plan(plan: ComparisonPlan, opened: Data, folder: Path, labels: Data | None) -> list[str]:
    asked, noun, n = plan.asked, opened.train.noun, len(opened.train)
    by = labels.train.name if labels is not None else "the data's own" if count_classes(opened.train) > 1 else "no"
    said = [f"comparing {len(plan.arms)} tasks on {n:,} {noun} of {opened.train.name}, by {by} labels"]
    said += [f"  {note}" for note in (*opened.notes, *plan.notes)]
    few = note_too_few_images(plan.held_out, noun) if by == "no" else ""
    said += [f"  {few.removesuffix('.')}"] * bool(few)
    said += [*plan.lines(), f"  all train on the same {n - plan.held_out:,} {noun}, with {plan.held_out:,} held out"]
    jobs = plan.jobs(folder)
    finished, seconds = sum(job.finished for job in jobs), duration(plan.seconds_left(folder))
    least = "at least" if any(arm.seconds is None for arm in plan.arms.values()) else "about"
    runs = f"  {len(jobs)} runs, {asked.seeds} of each task, with {plan.length} each"
    if finished == len(jobs):
        said.append(f"{runs}, are finished")
    elif any(job.done() for job in jobs):
        said.append(f"{runs}, take {least} {seconds} from now: {finished} of them are finished")
    else:
        overhead = f"with {duration(OVERHEAD)} of start-up, pictures and evaluation in each"
        said.append(f"{runs}, take {least} {seconds}, {overhead}")
    if asked.parallel > 1 and asked.minutes is None:
        said.append(f"  steps were timed with one run at a time: {asked.parallel} at once may be slower")
    # including untrained ones and raw pixels
    encoders = 0 if few else len(jobs) + asked.seeds + len(asked.beside) + (by != "no")
    how = "scored and fine-tuned" if asked.finetune and by != "no" else "scored"
    new = ", if they were not before," * plan.resumed
    what = f"{encoders} encoders are {how}{new} and " * bool(encoders)
    said.append(f"  then {what}the page is written, which was not timed")
    return [*said, f"  everything goes to {folder}{', where the comparison is resumed' * plan.resumed}"]
