"""Fingerprints of the results of every task, to prove that a change of the code leaves them equal.

    python benchmarks/fingerprints.py record before.json     # on the old code
    python benchmarks/fingerprints.py compare before.json    # on the new code

For every set of options in the sweep (`tests/support/options_swept.py`): the weights at the start and after two steps,
also of moving averages; random numbers used; losses, metrics and gradients; the held-out measure with its baselines;
pictures; predicted positions. Names of modules may differ, numbers may not. The exit code is 1 if any number differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from options_swept import OPTION_SETS
from sweep import build, views_of

WORDS = ("caption", "to beat")  # words may change, and are reported


def trace(tensor: Tensor) -> list[Any]:
    """Return the trace of a tensor: number of values, norm, sum with signs, and a digest of all bits; not its name."""
    found = tensor.detach().contiguous().cpu()
    numbers = found.double().nan_to_num(7.0, 11.0, 13.0).flatten()
    waves = torch.arange(len(numbers), dtype=torch.float64).sin()  # so that the order matters
    bits = hashlib.sha256(found.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return [len(numbers), numbers.norm().item(), (numbers @ waves).item(), bits]


def traces(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Return the traces of several tensors, in an order that does not depend on their names."""
    return sorted(map(trace, tensors))


def fingerprint(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that a task computes in two steps, a measure and its pictures."""
    task = build(name, asked=options).train()
    found: dict[str, Any] = {"built": traces(task.state_dict().values()), "drawn to build": torch.rand(()).item()}
    found["auto"] = {option: str(value) for option, (value, _) in task.chosen.items()}
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([one for one in task.parameters() if one.requires_grad], lr=0.1)
    for progress in (0.25, 0.75):
        optimizer.zero_grad()
        outcome = task(*views_of(task), progress=progress, generator=generator)
        outcome.loss.backward()
        found[f"loss at {progress}"] = outcome.loss.item()
        found[f"metrics at {progress}"] = {key: value.item() for key, value in outcome.metrics.items()}
        found[f"gradients at {progress}"] = traces(one.grad for one in task.parameters() if one.grad is not None)
        optimizer.step()
        task.after_step(progress)
        found[f"weights after {progress}"] = traces(task.state_dict().values())
    found["drawn"] = torch.rand((), generator=generator).item()
    with torch.no_grad():
        found |= held_out(task.eval(), generator)
    return found


def held_out(task: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """Return a task's held-out measure, pictures and predicted positions."""
    images = views_of(task, seed=1)[0]
    measure = task.measure(images, generator)
    found: dict[str, Any] = {"measure": {"": trace(measure.values), "name": measure.name, "unit": measure.unit}}
    found["measure"] |= {key: trace(value) for key, value in (measure.baselines | measure.details).items()}
    found["outputs"] = None if measure.outputs is None else trace(measure.outputs)
    found["to beat"] = measure.to_beat
    sheets = task.draw(images, generator)
    found["pictures"] = {sheet.name: {key: trace(one) for key, one in sheet.columns.items()} for sheet in sheets}
    found["caption"] = {sheet.name: sheet.caption for sheet in sheets}
    asked = task.questions["positions"] if "positions" in task.questions else None
    axes = {} if asked is None else asked.ratios
    found["axes"] = {axis: list(ratios) for axis, ratios in axes.items()}
    for ratios in [{}, {axis: values[1] for axis, values in axes.items()}] if axes else []:
        placed = asked.predict(task.encode(images, task.given(images, generator, **ratios), generator))
        found[f"places {ratios}"] = [trace(one) for one in (placed.visible, placed.dropped, placed.logits)]
    found["drawn in the end"] = torch.rand((), generator=generator).item()
    return found


def differences(before: Any, now: Any, path: str = "") -> list[tuple[str, str]]:
    """Yield the differences of two fingerprints: kind of difference, and path of the keys with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        return [line for key in keys for line in differences(before.get(key), now.get(key), f"{path} / {key}")]
    if before == now:
        return []
    named = before is None or now is None or any(f"/ {word}" in path for word in WORDS)
    kind = "words" if named else "ROUNDING" if near(before, now) else "NUMBERS"
    return [(kind, f"{path}: {str(before)[:160]} -> {str(now)[:160]}")]


def near(before: Any, now: Any) -> bool:
    """Return whether two values differ only by the rounding of sums in another order."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(map(near, before[:-1], now[:-1])) and (isinstance(now[-1], str) or near(before[-1], now[-1]))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-5, abs_tol=1e-6)
    return before == now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    now = {}
    for name, sets in OPTION_SETS.items():
        for options in sets:
            key = f"{name} {json.dumps(options)}"
            now[key] = fingerprint(name, options)
    now = json.loads(json.dumps(now))
    if args.verb == "record":
        args.file.write_text(json.dumps(now, indent=1))
        print(f"{len(now)} fingerprints in {args.file}")
        return 0
    before = json.loads(args.file.read_text())
    now = {key: value for key, value in now.items() if key in before}  # new options have no earlier fingerprint
    found = differences(before, now)
    print(*(f"{kind}: {line}" for kind, line in found), sep="\n")
    counts = {kind: sum(kind == one for one, _ in found) for kind in ("NUMBERS", "ROUNDING", "words")}
    whole = len({line.split(" / ")[1] for kind, line in found if kind != "words"})
    print(f"{len(now) - whole} of {len(now)} fingerprints are equal to the bit; differences: {counts}")
    return 1 if counts["NUMBERS"] else 0


if __name__ == "__main__":
    sys.exit(main())
