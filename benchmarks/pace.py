"""Training images per second of each task, data included, measured in interleaved rounds."""

from __future__ import annotations

import statistics
import time

import torch

from patchloom.data.loader import training_batches
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out
from patchloom.data.stats import channels_of, normalize, statistics_of
from patchloom.runs.settings import request
from patchloom.runs.task import prepare_task
from patchloom.system.distributed import launch
from patchloom.train.resolve import resolve
from patchloom.train.step import pretraining_optimizer


class Stepper:
    """Training steps of one task on real data, as in `patchloom pretrain` without workers."""

    def __init__(self, data: str, task: dict, settings: dict, rounds: int, steps: int):
        opened = open_data(data)
        training, _ = hold_out(opened.train, "auto", seed=0)
        channels = channels_of(training)
        stats = statistics_of(training, channels)
        asked = request(data, task, {"workers": 0, "epochs": 1, **settings})
        self.settings, _ = resolve(asked, len(training), channels, stats)
        self.fabric = launch(self.settings.device)
        self.task = prepare_task(self.settings, stats)
        optimizer = pretraining_optimizer(self.task, 0.05, self.settings.device)
        self.net, self.optimizer = self.fabric.setup(self.task, optimizer)
        self.stats, self.count = stats, steps
        size = self.settings.batch_size
        self.batches = training_batches(training, self.task.augment, size, 0, 0, 1 + rounds * steps, 0, channels)
        self.step()

    def step(self) -> None:
        batch = next(self.batches)
        views = [normalize(view.to(self.fabric.device), self.stats.mean, self.stats.std) for view in batch.views]
        outcome = self.net(*views, progress=0.5)
        self.fabric.backward(outcome.loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_step(0.5)

    def seconds(self) -> float:
        """Return seconds per step in one round; on a CPU the time of its own threads only."""
        on_cpu = self.settings.device == "cpu"
        clock, share = (time.process_time, torch.get_num_threads()) if on_cpu else (time.perf_counter, 1)
        start = clock()
        for _ in range(self.count):
            self.step()
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return (clock() - start) / share / self.count


def seconds_a_step(
    data: str, tasks: dict[str, dict], settings: dict, rounds: int = 3, steps: int = 5
) -> dict[str, tuple[float, int]]:
    """Return median seconds per step and images per step, by task; the tasks run in turns."""
    steppers = {name: Stepper(data, task, settings, rounds, steps) for name, task in tasks.items()}
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, stepper in steppers.items():
            found[name].append(stepper.seconds())
    return {name: (statistics.median(times), steppers[name].settings.batch_size) for name, times in found.items()}
