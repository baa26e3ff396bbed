"""Comparison of Pixio's changes to `mae` on small images: mask units, depth of the decoder, class tokens; three seeds.

    python benchmarks/get_data.py cifar5k /tmp/data
    OMP_NUM_THREADS=1 python benchmarks/pixio.py /tmp/data/cifar5k --seeds 0 1 2 -- --model nano --epochs 10

Each arm is `patchloom pretrain` with the options in `ARMS` and those after ``--``, on images of 32 pixels in patches of
4. All arms see the same number of images; a column has the time, which grows with the decoder. The encoder is then
frozen and measured as by `patchloom evaluate knn` (k = 20) and `linear`, with the mean of the patch tokens and with the
mean of all prefix tokens. Finished arms are read, not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer

from patchloom.cli import main as patchloom
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.evaluate.features import extract
from patchloom.evaluate.logistic import linear_probe
from patchloom.evaluate.protocols.knn import knn_answers
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, untrained_twin
from patchloom.system.files import write_whole

SIZES = ["--img_size", "32", "--patch_size", "4", "--workers", "0", "--threads", "1", "--device", "cpu"]
UNIT, DECODER, TOKENS = ["--task.mask_unit", "8"], ["--task.decoder_depth", "6"], ["--model.reg_tokens", "3"]
ARMS = {
    "mae": [],
    "units of 2x2": UNIT,
    "decoder of 6 blocks": DECODER,
    "4 class tokens": TOKENS,
    "all three": [*UNIT, *DECODER, *TOKENS],
}
K = 20


def scores(vit: VisionTransformer, card: EncoderCard, train: Source, test: Source) -> dict[str, float]:
    """Return the accuracies on the test images, by protocol and pooling."""
    one, two = (extract(vit, card, source, device="cpu") for source in (train, test))
    found = {}
    for name in ("mean", "prefix" if "prefix" in one.tokens else "class"):
        pooling = "mean" if name == "mean" else "front"
        features, others = one.pooled(name), two.pooled(name)
        right = knn_answers(features, one.labels, others, (K,))[K][0] == two.labels
        found[f"knn {pooling}"] = right.double().mean().item()
        found[f"linear {pooling}"] = (
            linear_probe(features, one.labels)[0].right(others, two.labels).double().mean().item()
        )
    return found


def measured(run: Path, data: str) -> dict[str, float]:
    """Return the scores of a run's encoder and its untrained twin, and the minutes of training; stored in the run."""
    kept = run / "pixio.json"
    if not kept.exists():
        opened, (vit, card) = open_data(data), load_encoder_file(run)
        assert opened.test is not None, f"{data} has no test images"
        twin, _ = untrained_twin(card)
        found = scores(vit, card, opened.train, opened.test)
        found |= {f"untrained {name}": value for name, value in scores(twin, card, opened.train, opened.test).items()}
        with open(run / "metrics.csv", newline="") as file:
            found["minutes"] = float(list(csv.DictReader(file))[-1]["seconds"]) / 60
        write_whole(kept, json.dumps(found))
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--out", type=Path, default=Path("/tmp/patchloom-pixio"))
    args, words = parser.parse_known_args()
    words = [word for word in words if word != "--"]
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
    for seed in args.seeds:  # in turns, so that other work on the machine affects all arms equally
        for arm in args.arms:
            run = args.out / f"{arm.replace(' ', '-')}-{seed}"
            about = ["--task", "mae", "--seed", str(seed), "--out", str(run), *SIZES, *ARMS[arm], *words]
            if code := patchloom(["pretrain", args.data, *about]):
                sys.exit(code)
            found[arm].append(measured(run, args.data))
            print(arm, seed, found[arm][-1], flush=True)
    columns = ["knn mean", "knn front", "linear mean", "linear front"]
    print("", "| arm | kNN: mean | kNN: in front | linear: mean | linear: in front | minutes |", sep="\n")
    print("| --- | --- | --- | --- | --- | --- |")
    for arm, results in found.items():
        cells = [spread([one[name] for one in results]) for name in columns]
        print(f"| {arm} | {' | '.join(cells)} | {statistics.mean(one['minutes'] for one in results):.1f} |")
    for arm in filter(found.get, ("mae", "4 class tokens")):
        cells = [spread([one[f"untrained {name}"] for one in found[arm]]) for name in columns]
        print(f"| {arm}, untrained | {' | '.join(cells)} | |")


def spread(values: list[float]) -> str:
    """Return the mean and the range."""
    return f"{100 * statistics.mean(values):.1f} % ({100 * min(values):.1f}-{100 * max(values):.1f})"


if __name__ == "__main__":
    main()
