"""Seconds from the command to an accuracy: patchloom beside the MAE programs of Hugging Face and of lightly.

    for name in cifar5k camvid; do python benchmarks/get_data.py $name /tmp/data; done
    python -m venv /tmp/peers && /tmp/peers/bin/pip install torch lightly[timm] 'transformers[torch]' datasets
    python benchmarks/to_quality.py cifar /tmp/data/cifar5k --programs /tmp/programs --peers /tmp/peers/bin/python
    python benchmarks/to_quality.py camvid /tmp/data/camvid --programs /tmp/programs --peers /tmp/peers/bin/python

``/tmp/programs`` holds ``run_mae.py`` (transformers, examples/pytorch/image-pretraining) and ``mae.py`` (lightly,
examples/pytorch) as their repositories have them.

Encoder of all: `nano` (width 128, 6 blocks, 4 heads), which is patchloom's default on a CPU, on 32 pixels in patches of
4 (CIFAR-10) or 96 in patches of 8 (CamVid), the sizes that ``auto`` gives for these folders. Arms:

- ``patchloom``: ``patchloom pretrain FOLDER``, all defaults.
- ``hf``, ``lightly``: the programs as documented, with this encoder and image size. Hugging Face's runs by the command
  of its README, without evaluations, which would only cost it time. In lightly's, `edits` are replaced.
- ``hf small``, ``lightly small``: also with patchloom's small decoder and batch, and one process that reads.
- ``hf tuned``, ``lightly tuned``: also with patchloom's learning rate, Adam's β₂ and weight decay.

Each writes its weights after every `EVERY` images. The clock runs from the start of its process to the first file whose
encoder reaches the target; the measuring comes after the run and is not counted. A rising curve is assumed: the first
file is found by halving. CIFAR-10: kNN (k = 20, cosine) on the mean of the patch tokens, 5,000 training images as
gallery, 2,000 test images. CamVid: mIoU of cells by a linear layer on the frozen patch tokens, as in `defaults.py`.

A start is the time to the first of these files. Cold: the system's file cache (needs root) and every cache of the
program are dropped before. Warm: the second process after that. Only warm runs go on; "cold" seconds to the target are
theirs with the cold start in the place of the warm one. Finished runs are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, DEPTH, HEADS = 128, 6, 4  # `nano`
DECODER_WIDTH, DECODER_DEPTH, DECODER_HEADS = 128, 2, 4  # of `mae` with `nano`
EVERY = 2_000  # images between two files of weights


class Job(NamedTuple):
    """Images to train on, the shape of the encoder's input, and the target.

    Attributes:
        images: folder below that of the data.
        side: side of the encoder's images in pixels.
        patch: side of a patch in pixels.
        batch, epochs: images per step and passes of patchloom's ``auto``.
        measure: name of the accuracy.
        target: accuracy to reach.
    """

    images: str
    side: int
    patch: int
    batch: int
    epochs: float
    measure: str
    target: float


# CIFAR-10's target was fixed by a pilot of patchloom with seed 100. CamVid's lies within the noise of its pilot: see
# README.md.
JOBS = {
    "cifar": Job("train", 32, 4, 128, 42, "kNN", 0.34),
    "camvid": Job("images/train", 96, 8, 32, 660, "mIoU of cells", 0.27),
}


class Arm(NamedTuple):
    """A program, and the changes to it: "documented", "small" or "tuned"."""

    program: str
    changes: str = "documented"

    @property
    def small(self) -> bool:
        """Whether it has patchloom's decoder and batch."""
        return self.changes != "documented"

    @property
    def tuned(self) -> bool:
        """Whether it has patchloom's learning rate, β₂ and weight decay."""
        return self.changes == "tuned"


ARMS = {
    "patchloom": Arm("patchloom"),
    "hf": Arm("hf"),
    "hf small": Arm("hf", "small"),
    "hf tuned": Arm("hf", "tuned"),
    "lightly": Arm("lightly"),
    "lightly small": Arm("lightly", "small"),
    "lightly tuned": Arm("lightly", "tuned"),
}


class Trial(NamedTuple):
    """One run of an arm: its job, images and settings."""

    job: Job
    data: Path
    arm: Arm
    epochs: float | None  # None: patchloom's `auto`
    seed: int
    out: Path

    @property
    def images(self) -> Path:
        """Folder of the training images."""
        return self.data / self.job.images

    @property
    def files(self) -> Path:
        """Folder of the weights."""
        return self.out / "weights"

    @property
    def batch(self) -> int:
        """Images per step."""
        if self.arm.small or self.arm.program == "patchloom":
            return self.job.batch
        return {"hf": 8, "lightly": 256}[self.arm.program]

    @property
    def rate(self) -> float:
        """Learning rate of patchloom's `auto` for this encoder, for a tuned peer."""
        return 4e-3 * self.batch / 256

    @property
    def every(self) -> int:
        """Steps between two files of weights."""
        return max(1, round(EVERY / self.batch))


# ---- the commands


def hugging_face(trial: Trial, processor: Path) -> list[str]:
    """Return the words of Hugging Face's command in its README, with our encoder and folder; evaluations are left out.

    ``processor`` is a folder with the size of the images.
    """
    sizes: dict[str, int] = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": 4 * WIDTH, "image_size": trial.job.side, "patch_size": trial.job.patch}
    options: dict[str, Any] = {
        "dataset_name": "imagefolder",
        "train_dir": f"{trial.images}/**",
        "train_val_split": 0.0,
        "image_processor_name": processor,
        "output_dir": trial.files,
        "remove_unused_columns": False,
        "label_names": "pixel_values",
        "mask_ratio": 0.75,
        "base_learning_rate": 1.5e-4,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.05,
        "num_train_epochs": trial.epochs,
        "warmup_steps": 0.05,
        "per_device_train_batch_size": trial.batch,
        "logging_strategy": "steps",
        "logging_steps": 10,
        "save_strategy": "steps",
        "save_steps": trial.every,
        "save_only_model": True,
        "report_to": "none",
        "seed": trial.seed,
    }
    if trial.arm.small:
        sizes |= {"decoder_hidden_size": DECODER_WIDTH, "decoder_num_hidden_layers": DECODER_DEPTH}
        sizes |= {"decoder_num_attention_heads": DECODER_HEADS, "decoder_intermediate_size": 4 * DECODER_WIDTH}
        options["dataloader_num_workers"] = 1
    if trial.arm.tuned:
        options |= {"base_learning_rate": 4e-3, "warmup_steps": 0.1, "adam_beta2": 0.95}
    options["config_overrides"] = ",".join(f"{name}={value}" for name, value in sizes.items())
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--norm_pix_loss", "--do_train"]


def edits(trial: Trial) -> list[tuple[str, str]]:
    """Return what is replaced in lightly's example: (its text, ours)."""
    job = trial.job
    shape = f"img_size={job.side}, patch_size={job.patch}, embed_dim={WIDTH}, depth={DEPTH}, num_heads={HEADS}"
    found = [
        ("import vit_base_patch32_224", "import VisionTransformer"),
        ("vit_base_patch32_224()", f"VisionTransformer({shape}, num_classes=0)"),
        ("MAETransform()", f"MAETransform(input_size={job.side})"),
        ("dataset = torchvision.datasets.VOCDetection(", "dataset = lightly.data.LightlyDataset("),
        ('"datasets/pascal_voc"', repr(str(trial.images))),
        ("    download=True,\n", ""),
        ("    target_transform=target_transform,\n", ""),
        ("import torchvision\n", "import lightly.data\n"),
        ("range(10)", f"range({trial.epochs:g})"),
        ("optimizer.zero_grad()", "optimizer.zero_grad(); after_step(model.backbone.vit)"),
    ]
    if trial.arm.small:
        found += [
            ("decoder_dim = 512", f"decoder_dim = {DECODER_WIDTH}"),
            ("depth=1", f"depth={DECODER_DEPTH}"),
            ("num_heads=16", f"num_heads={DECODER_HEADS}"),
            ("batch_size=256", f"batch_size={trial.batch}"),
            ("num_workers=8", "num_workers=1"),
        ]
    if trial.arm.tuned:
        found.append(("lr=1.5e-4", f"lr={trial.rate:g}, betas=(0.9, 0.95), weight_decay=0.05"))
    return found


def replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Replace each text, which must occur exactly once when its turn comes."""
    for old, new in pairs:
        if (count := text.count(old)) != 1:
            raise SystemExit(f"the example has {old!r} {count} times instead of once: it is another version")
        text = text.replace(old, new)
    return text


def command(trial: Trial, programs: Path, peers: str) -> list[str]:
    """Return the command of a trial."""
    if trial.arm.program == "hf":
        processor = trial.out / "processor"
        processor.mkdir(parents=True)
        size = {"height": trial.job.side, "width": trial.job.side}
        about = {"image_processor_type": "ViTImageProcessor", "size": size}
        (processor / "preprocessor_config.json").write_text(json.dumps(about))
        return [peers, str(programs / "run_mae.py"), *hugging_face(trial, processor)]
    here = [str(Path(__file__).resolve()), "--child", str(trial.every), str(trial.files)]
    if trial.arm.program == "lightly":
        example = trial.out / "mae.py"
        example.write_text(replaced((programs / "mae.py").read_text(), edits(trial)))
        return [peers, *here, "lightly", str(example), str(trial.seed)]
    words = ["pretrain", str(trial.images), "--out", str(trial.out / "run"), "--seed", str(trial.seed)]
    words += [] if trial.epochs is None else ["--epochs", f"{trial.epochs:g}"]
    return [sys.executable, *here, "patchloom", *words]


# ---- in the process of a program: it writes its weights on its way


class Writer:
    """Write an encoder's weights by timm's names, after every some steps."""

    def __init__(self, every: int, folder: Path):
        self.every, self.folder, self.step = every, folder, 0
        folder.mkdir(parents=True)

    def __call__(self, vit: Any, mean: Sequence[float], std: Sequence[float]) -> None:
        import torch

        self.step += 1
        if self.step % self.every:
            return
        path = self.folder / f"{self.step:07d}.pt"
        torch.save({"weights": vit.state_dict(), "mean": list(mean), "std": list(std)}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def child(every: str, folder: str, program: str, *words: str) -> None:
    """Be patchloom, or lightly's example, with a `Writer` after each step."""
    write = Writer(int(every), Path(folder))
    if program == "lightly":
        import torch

        example, seed = words
        torch.manual_seed(int(seed))
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        code = compile(Path(example).read_text(), example, "exec")
        exec(code, {"__name__": "__main__", "after_step": lambda vit: write(vit, mean, std)})
        return
    import patchloom.cli

    function_of = patchloom.cli.function_of

    def load_and_hook(verb: str) -> Any:
        """Add the writer where patchloom itself imports the training, so that its start takes as long as ever."""
        function = function_of(verb)
        if verb == "pretrain":
            from patchloom.train.step import Stepper

            update = Stepper.update

            def update_and_write(self: Stepper, *given: Any) -> Any:
                made = update(self, *given)
                write(self.task.encoder, self.task.mean.flatten().tolist(), self.task.std.flatten().tolist())
                return made

            Stepper.update = update_and_write
        return function

    patchloom.cli.function_of = load_and_hook
    sys.exit(patchloom.cli.main(list(words)))


# ---- running


def run(trial: Trial, cold: bool, caches: Path, programs: Path, peers: str, limit: float, enough: float) -> None:
    """Run a trial until it has trained on ``enough`` images, or for ``limit`` seconds; store the times of its files."""
    shutil.rmtree(trial.out, ignore_errors=True)
    trial.out.mkdir(parents=True)
    words = command(trial, programs, peers)
    if cold:
        shutil.rmtree(caches, ignore_errors=True)
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    elif not caches.exists():
        raise SystemExit(f"{caches} is missing: run cold first")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    own = {"XDG_CACHE_HOME": str(caches), "HF_HOME": str(caches / "huggingface")}
    own |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "HF_HUB_OFFLINE": "1"}
    with open(trial.out / "log.txt", "w") as log:
        began = time.time()
        process = subprocess.Popen(words, env=kept | own, stdout=log, stderr=log, start_new_session=True)
        while process.poll() is None and time.time() < began + limit:
            if max(map(step_of, weights_in(trial.files)), default=0) * trial.batch >= enough:
                time.sleep(1)  # the files beside the weights
                break
            time.sleep(0.2)
        if (code := process.poll()) is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise SystemExit(f"{' '.join(words)} failed: see {trial.out}/log.txt")
    written = sorted(weights_in(trial.files), key=step_of)
    times = {str(path.relative_to(trial.out)): path.stat().st_mtime - began for path in written}
    (trial.out / "times.json").write_text(json.dumps(times, indent=1))


def weights_in(folder: Path) -> list[Path]:
    """Return the files of weights of a run."""
    return [*folder.glob("*.pt"), *folder.glob("checkpoint-*/model.safetensors")]


def step_of(path: Path) -> int:
    """Return the steps before a file of weights was written."""
    return int(path.stem if path.suffix == ".pt" else path.parent.name.rpartition("-")[2])


# ---- measuring


def first_reaching(count: int, reaches: Callable[[int], bool]) -> int | None:
    """Return the first of ``count`` items that reaches, by halving; None if the last one does not."""
    if not count or not reaches(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low


def load(path: Path, job: Job) -> tuple[Any, Any, Any]:
    """Return an encoder from a file of weights, with mean and standard deviation of its images."""
    import torch

    from patchloom.nets.build import EncoderSpec, build_encoder
    from patchloom.nets.checkpoints.fit import load_pretrained

    if path.suffix == ".safetensors":
        vit, card = load_pretrained(path.parent)
        return vit, card.mean, card.std
    stored = torch.load(path)
    vit = build_encoder(EncoderSpec("nano", (job.side, job.side), job.patch))
    vit.load_state_dict(stored["weights"])
    return vit.eval(), stored["mean"], stored["std"]


def measure(path: Path, job: Job, data: Path) -> float:
    """Return the accuracy of the encoder in a file of weights."""
    from types import SimpleNamespace

    from defaults import cell_features, score

    vit, mean, std = load(path, job)
    if job.measure == "kNN":
        return knn(vit, mean, std, data)
    card = SimpleNamespace(mean=mean, std=std)
    return score(data, {part: cell_features(vit, card, frames(data, part, job.side)) for part in ("train", "test")})


def knn(vit: Any, mean: Sequence[float], std: Sequence[float], data: Path) -> float:
    """Return the kNN accuracy of the means of the patch tokens."""
    import torch

    from patchloom.evaluate.protocols.knn import knn_accuracies

    found: list[Any] = []
    for part in ("train", "test"):
        images, labels = labelled(data / part)
        images = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        with torch.inference_mode():
            each = [vit.forward_features(batch)[:, vit.num_prefix_tokens :].mean(1) for batch in images.split(250)]
        found += [torch.cat(each), labels]
    return knn_accuracies(*found, ks=(20,))[20]


@cache
def frames(data: Path, part: str, side: int) -> Any:
    """Return the frames of a part, read once: uint8 [frames 3 side side]."""
    import defaults

    return defaults.frames(data, part, side)


@cache
def labelled(folder: Path) -> tuple[Any, Any]:
    """Return the images of a folder with a subfolder per class, read once: uint8 [n 3 h w], and their classes [n]."""
    import numpy as np
    import torch
    from PIL import Image

    paths = [(path, number) for number, kind in enumerate(sorted(folder.iterdir())) for path in sorted(kind.iterdir())]
    pictures = np.stack([np.array(Image.open(path).convert("RGB")) for path, _ in paths])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2), torch.tensor([number for _, number in paths])


class Reached(NamedTuple):
    """Result of a run.

    Attributes:
        first: seconds to the first file of weights.
        seconds: seconds to the first file that reaches the target; None if none does.
        images: images seen by then; without such a file, by the last one.
        last: accuracy of the last file.
        rate: images per second between the first and the last file.
    """

    first: float
    seconds: float | None
    images: int
    last: float
    rate: float


def reached(trial: Trial) -> Reached:
    """Return when a finished run reached its target; every measured accuracy is stored."""
    times = times_of(trial)
    kept = trial.out / "scores.json"
    scores: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    names = list(times)

    def accuracy(number: int) -> float:
        name = names[number]
        if name not in scores:
            scores[name] = measure(trial.out / name, trial.job, trial.data)
            kept.write_text(json.dumps(scores, indent=1))
        return scores[name]

    found = first_reaching(len(names), lambda number: accuracy(number) >= trial.job.target)
    images = [step_of(trial.out / name) * trial.batch for name in names]
    passed = times[names[-1]] - times[names[0]]
    rate = (images[-1] - images[0]) / passed if passed else float("nan")
    seconds = None if found is None else times[names[found]]
    return Reached(times[names[0]], seconds, images[-1 if found is None else found], accuracy(len(names) - 1), rate)


def times_of(trial: Trial) -> Mapping[str, float]:
    """Return the seconds from the start of a finished run to each of its files of weights."""
    times: Mapping[str, float] = json.loads((trial.out / "times.json").read_text())
    if not times:
        raise SystemExit(f"{trial.out} has no weights: give it more time with --limit")
    return times


# ---- the table


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """Return median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def row(name: str, cold: Sequence[float], warm: Sequence[Reached]) -> str:
    """Return a row of the table, from the cold seconds to the first file and the warm runs, seed by seed."""
    parts = [name, spread(cold), spread([one.first for one in warm]), spread([one.rate for one in warm])]
    parts.append(spread([100 * one.last for one in warm], ".1f"))
    done = [(start, one) for start, one in zip(cold, warm, strict=True) if one.seconds is not None]
    if len(done) < len(warm):
        return f"| {' | '.join(parts)} | not reached by {len(warm) - len(done)} of {len(warm)} | | |"
    parts.append(spread([one.images for _, one in done], ",.0f"))
    parts.append(spread([one.seconds for _, one in done]))
    parts.append(spread([one.seconds - one.first + start for start, one in done]))
    return f"| {' | '.join(parts)} |"


def main(words: Sequence[str] | None = None) -> None:
    """Run the trials that are missing, measure them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("data", type=Path, help="folder of cifar5k or camvid")
    parser.add_argument("--programs", type=Path, required=True, help="folder of run_mae.py and mae.py")
    parser.add_argument("--peers", default=sys.executable, help="Python with transformers and lightly")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--epochs", type=float, help="passes of every arm; patchloom's auto if absent (42, 660)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--images", type=float, default=200_000, help="images after which a run is ended")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run is ended")
    parser.add_argument("--run_only", action="store_true", help="measure later, by the same command without this")
    parser.add_argument("--out", type=Path, default=Path("/tmp/patchloom-to-quality"))
    given = parser.parse_args(words)
    job = JOBS[given.job]
    cold: dict[str, list[float]] = {name: [] for name in given.arms}
    warm: dict[str, list[Reached]] = {name: [] for name in given.arms}
    for seed in given.seeds:
        for name in given.arms:
            arm = ARMS[name]
            usual = None if arm.program == "patchloom" else job.epochs
            epochs = usual if given.epochs is None else given.epochs
            length = "auto" if epochs is None else f"{epochs:g}"
            for state, images in (("cold", EVERY), ("warm", given.images)):
                out = given.out / given.job / "-".join([*name.split(), length, str(seed), state])
                trial = Trial(job, given.data, arm, epochs, seed, out)
                if not (out / "times.json").exists():
                    caches = given.out / "caches" / arm.program
                    run(trial, state == "cold", caches, given.programs, given.peers, given.limit, images)
                first = next(iter(times_of(trial).values()))
                print(f"  {out.name}: first weights after {first:.1f} s", flush=True)
                if state == "cold":
                    cold[name].append(first)
                elif not given.run_only:
                    warm[name].append(reached(trial))
    if given.run_only:
        return
    print(f"\n{job.measure} of {100 * job.target:.1f} %; median and range of seeds {given.seeds}\n")
    print("| program | cold start, s | warm start, s | images/s | last, % | images to it | s, warm | s, cold |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in given.arms:
        print(row(name, cold[name], warm[name]))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
