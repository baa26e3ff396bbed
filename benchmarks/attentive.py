"""`evaluate attentive` beside efficient probing in plain torch, written from the paper's equations, on the same tokens.

    python benchmarks/attentive.py RUN DATA --seeds 0 1 2

Each seed has three trainings by the recipe small: the tool's; the plain one from the same initial values with the same
batches, which should give the same answers; and the plain one with draws of its own, which shows what chance does.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
from patchloom.evaluate.classification import test_classifiers
from patchloom.evaluate.protocols.attentive import cached_tokens, candidate, small_plan
from patchloom.evaluate.recipes import Course
from patchloom.evaluate.select import train_candidates
from patchloom.evaluate.settings import EvalSettings, Subject, parts_of
from patchloom.evaluate.trainer import temporary_seed


class Plain(nn.Module):
    """Efficient probing (arXiv 2506.10178): y_j = softmax(u_j X' / √d) X W_j, then batch norm and a linear layer."""

    def __init__(self, d: int, m: int, classes: int) -> None:
        super().__init__()
        self.u = nn.Parameter(0.02 * torch.randn(m, d))
        self.w = nn.Parameter(torch.empty(d, d).uniform_(-(d**-0.5), d**-0.5))  # as torch begins a linear layer
        self.norm, self.head = nn.BatchNorm1d(d, eps=1e-6, affine=False), nn.Linear(d, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [b c] of tokens [b n d]."""
        a = (torch.einsum("md,bnd->bmn", self.u, x) / math.sqrt(x.shape[-1])).softmax(-1)
        v = (x @ self.w).unflatten(-1, (len(self.u), -1))  # [b n m d/m]: a slice of the channels for each query
        return self.head(self.norm(torch.einsum("bmn,bnmo->bmo", a, v).flatten(1)))


def fit(model: Plain, train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], course: Course, seed: int) -> Plain:
    """Train by AdamW with warm-up and cosine decay, and return the epoch that is best on held-out images."""
    (x, y), b, optimizer = train, course.batch, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    best, risen, chosen = (-1.0, -math.inf), 0, copy.deepcopy(model)
    for step in range(course.steps):
        epoch, place = divmod(step, len(x) // b)
        order = np.random.default_rng((seed, epoch)).permutation(len(x))[place * b :][:b]
        over = max(0, step + 1 - course.warmup) / (course.steps - course.warmup + 1)
        rate = 1e-3 * ((step + 1) / course.warmup if step + 1 < course.warmup else (1 + math.cos(math.pi * over)) / 2)
        optimizer.param_groups[0]["lr"] = rate
        F.cross_entropy(model.train()(x[order]), y[order]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % course.every == 0 or step + 1 == course.steps:
            with torch.no_grad():
                logits = model.eval()(held[0])
            score = (logits.argmax(1) == held[1]).double().mean().item(), -F.cross_entropy(logits, held[1]).item()
            risen = step + 1 if score[0] > best[0] else risen
            if score > best:
                best, chosen = score, copy.deepcopy(model)
            if step + 1 - max(risen, course.warmup) >= course.patience * course.steps:
                break
    return chosen.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of patchloom pretrain, or an encoder's file")
    parser.add_argument("data", help="labelled images with a test part")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    vit, card = patchloom.load_encoder(args.run)
    differences, chances = [], []
    for seed in args.seeds:
        settings = EvalSettings(seed=seed, device="cpu", workers=0, cache=False)
        parts = parts_of(args.data, settings, card=card)
        plan = small_plan(vit, parts, settings, "float32")
        one, begun = candidate(Subject("ours", vit, card), parts), time.perf_counter()
        (fitted,) = train_candidates([one], plan, quiet=True)
        ours = test_classifiers("attentive", [fitted], plan, "float32")[1][0]
        seconds = time.perf_counter() - begun

        with temporary_seed(settings):  # as the tool begins
            model = one.build(plan.recipe)
        train, held = parts.trained_on(plan.recipe, settings)
        found = (cached_tokens(model, card, part, settings, "float32", 1.0) for part in (train, held, parts.test))
        known, checked, test = [(each.tokens["tokens"], each.labels) for each in found]
        torch.manual_seed(seed)
        drawn = Plain(model.token_width, len(model.pool.queries), model.classes)
        same = copy.deepcopy(drawn)
        with torch.no_grad():
            same.u.copy_(model.pool.queries)
            same.w.copy_(model.pool.values.weight.T)
            same.head.load_state_dict(model.head.state_dict())
        course = plan.course()
        same, drawn = fit(same, known, checked, course, seed), fit(drawn, known, checked, course, 1000 + seed)
        with torch.no_grad():
            answers, own = same(test[0]), drawn(test[0])
        theirs, by_chance = ((each.argmax(1) == test[1]).double().mean().item() for each in (answers, own))
        differences.append(100 * (ours.accuracy() - theirs))
        chances.append(100 * (ours.accuracy() - by_chance))
        differ = int((answers.argmax(1) != ours.logits.argmax(1)).sum())
        print(
            f"seed {seed}: patchloom {ours.accuracy():.2%} in {seconds:.0f} s; plain, same draws {theirs:.2%}, "
            f"{differ} of {len(test[1]):,} answers differ; plain, own draws {by_chance:.2%}",
            flush=True,
        )
    print(
        f"patchloom minus plain, points: same draws {np.mean(differences):+.3f}, largest "
        f"{max(map(abs, differences)):.3f}; own draws {np.mean(chances):+.2f}, largest {max(map(abs, chances)):.2f}"
    )


if __name__ == "__main__":
    main()
