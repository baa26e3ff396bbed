"""Options of ``patchloom pretrain``, which are the settings of a run, and their impossible combinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from patchloom.options.declare import DATA, MACHINE, MODEL, TASK, TRAINING, Auto, check_declared, option, place
from patchloom.options.recipes import Border
from patchloom.options.refusals import refuse
from patchloom.sizes import PatchSize

FeatureKind = Literal["mfcc", "logmel"]
PositionKind = Literal["sincos", "sincos-learned", "learned", "random", "rotary", "none"]
Compile = bool | Literal["graphs"]
Adapt = Literal["all", "blocks", "lora"]
Target = Literal["both", "attention", "mlp"]
MAX_SIDE, MAX_MAGNITUDE = 2**16, 10


@dataclass(frozen=True)
class PretrainOptions:
    """Options of a run; `Settings` and the arguments of ``pretrain`` differ in the types of the first three."""

    data: Any = place("folder of images, or another data source")
    task: Any = field(default_factory=dict)
    model: Any = field(default_factory=dict)

    img_size: tuple[int, int] | Auto = option(
        "auto",
        "image size of the encoder in pixels; 64x128 is height x width",
        least=1,
        most=MAX_SIDE,
        kind="96, 64x128 or auto",
        group=DATA,
    )
    crop_scale: float | Literal["auto", "native"] | Border = option(
        "auto",
        "smallest area of a random crop, as a fraction of the image; native: crops at the image's own scale. padded or "
        "reflected: the whole image, shifted by up to 4 pixels, with black or reflected pixels around it",
        above=0,
        most=1,
        group=DATA,
        rare=True,
    )
    flip: bool = option(True, "random horizontal flips. Switch them off if left and right matter", group=DATA)
    held_out: float | Auto = option(
        "auto",
        "fraction of images held out for validation, at most 2,000 images; auto: 5 %, more for small data sets; 0 "
        "trains on all, and measures nothing",
        least=0,
        below=1,
        group=DATA,
    )
    knn_k: int = option(
        20,
        "number of neighbours for the kNN accuracy during training, with labels only (ExtreMA: 200)",
        least=1,
        group=DATA,
        rare=True,
    )
    knn_gallery: int = option(
        2000,
        "largest number of training images to search for neighbours (ExtreMA: a tenth of ImageNet)",
        least=2,
        group=DATA,
        rare=True,
    )
    group: str | None = option(
        None,
        "images held out together, such as frames of a video: parent (folder), a column of a table, or a regular "
        "expression. The parentheses of the expression capture the group in the path",
        group=DATA,
    )
    channels: int | Auto = option(
        "auto",
        "number of channels; greyscale and colour are converted into each other",
        least=1,
        most=2**16,
        group=DATA,
        rare=True,
    )
    normalization: Literal["data", "imagenet", "init"] | Auto = option(
        "auto",
        "source of the mean and std of the channels: the data, ImageNet, or the initial weights (init); auto: init "
        "with --init, else data",
        group=DATA,
        rare=True,
    )
    cache: Literal["none", "whole"] | int | Auto = option(
        "auto",
        "cache of decoded training images, filled in the first epoch: none, whole (full size), or a shorter side in "
        "pixels for larger images. auto: whole, if that saves much work and fits into memory and on the disc",
        least=1,
        group=DATA,
        rare=True,
    )
    seconds: float = option(
        1.0, "length to which recordings are cut or padded", above=0, most=3600, group=DATA, rare=True
    )
    rate: int = option(
        16_000,
        "sampling rate in Hz to which recordings are resampled",
        least=1000,
        most=10**6,
        group=DATA,
        rare=True,
    )
    features: FeatureKind = option(
        "mfcc",
        "pictures of recordings: mel-frequency cepstral coefficients (mfcc) or mel spectrograms (logmel)",
        group=DATA,
        rare=True,
    )
    bins: int = option(
        40,
        "rows in the pictures of recordings: coefficients or mel bands",
        least=1,
        most=4096,
        group=DATA,
        rare=True,
    )

    patch_size: PatchSize | Auto = option(
        "auto", "side of a patch in pixels; 40x1 is rows x columns", least=1, most=MAX_SIDE, group=MODEL
    )
    positions: PositionKind | Auto = option(
        "auto",
        "position embeddings: sincos, sincos-learned (starts as sincos), learned (starts random), random or none. "
        "sincos and random stay fixed. rotary: rotations only, for models such as DINOv3",
        group=MODEL,
        rare=True,
    )
    initialization: Literal["xavier", "normal"] = option(
        "xavier",
        "random initial weights: xavier, as in MAE, or normal with deviation 0.02, as in DeiT and SimMIM",
        group=MODEL,
        rare=True,
    )
    init: str | None = option(
        None,
        "initial weights: timm:NAME, a run, a file, or a published checkpoint; for unusual sizes, give --model",
        group=MODEL,
    )
    from_run: str | None = option(None, "folder of a run to take the initial weights from", group=MODEL)
    adapt: Adapt | Auto = option(
        "auto",
        "trained weights of an encoder from --init or --from: all, the last blocks, or low-rank updates of the blocks' "
        "weights (lora), which are merged when the encoder is written",
        group=MODEL,
    )
    train_blocks: int | None = option(
        None,
        "number of last blocks to train with --adapt blocks (2 if absent), with the last norm; with lora, they are "
        "trained whole, and the others by updates",
        least=0,
        group=MODEL,
    )
    lora_rank: int = option(16, "rank of the low-rank updates", least=1, group=MODEL, rare=True)
    lora_on: Target = option(
        "both", "layers with low-rank updates: those of the attention, of the MLP, or both", group=MODEL, rare=True
    )
    heads_first: float | Auto = option(
        "auto",
        "fraction of the steps in which only new parts train: decoder, heads and tokens of the task",
        least=0,
        below=1,
        group=MODEL,
        rare=True,
    )
    anchor: float = option(
        0.0,
        "weight of a loss that keeps features near those of the initial weights: 1 - their cosine on whole images; 0 "
        "switches it off",
        least=0,
        group=MODEL,
    )

    recipe: str | None = option(
        None,
        "row of a paper's table, with defaults for settings that are not given; `patchloom recipes` lists them",
        group=TASK,
    )

    epochs: float | Auto = option(
        "auto", "passes over the training images; 0.5 is half a pass", above=0, most=2**31 - 1, group=TRAINING
    )
    minutes: float | None = option(
        None,
        "training time by the clock instead of epochs, with held-out measures; the number of epochs is planned from a "
        "timing, anew on the way, and is stored",
        above=0,
        most=10**6,
        group=TRAINING,
    )
    batch_size: int | Auto = option("auto", "images per step, over all devices", least=1, group=TRAINING)
    accumulate: int = option(1, "steps per update, whose gradients are accumulated", least=1, group=TRAINING, rare=True)
    blr: float | Auto = option(
        "auto", "base learning rate; the peak is blr · (images per update) / 256", above=0, group=TRAINING
    )
    least_rate: float = option(
        0.0,
        "learning rate at the end of the cosine, not scaled by the batch (DINO, I-JEPA: 1e-6; MAE: 0)",
        least=0,
        group=TRAINING,
        rare=True,
    )
    weight_decay: float | Auto = option(
        "auto",
        "weight decay of AdamW, without biases, norms and positions; auto: 0.05, for extrema 0.1",
        least=0,
        group=TRAINING,
        rare=True,
    )
    final_weight_decay: float | None = option(
        None,
        "weight decay at the end of training, which --weight_decay reaches as a cosine (DINO, I-JEPA: from 0.04 to "
        "0.4); constant if absent",
        least=0,
        group=TRAINING,
        rare=True,
    )
    betas: tuple[float, float] = option(
        (0.9, 0.95),
        "decay rates of AdamW's two moments; DeiT and MP3 use [0.9, 0.999]",
        least=0,
        below=1,
        group=TRAINING,
        rare=True,
    )
    layer_decay: float | Auto = option(
        "auto",
        "ratio of the learning rates of a block and the next one; 1 disables it",
        above=0,
        most=1,
        group=TRAINING,
        rare=True,
    )
    warmup_epochs: float | Auto = option(
        "auto", "epochs of linear warm-up to the peak learning rate", least=0, group=TRAINING, rare=True
    )
    halve_every: int = option(
        0,
        "updates between halvings of the learning rate (MP3's speech models); 0: cosine decay to 0. With halvings, the "
        "warm-up is constant at a tenth of the peak",
        least=0,
        group=TRAINING,
        rare=True,
    )
    clip: float = option(5.0, "largest gradient norm; 0 switches clipping off", least=0, group=TRAINING, rare=True)
    patience: int | None = option(
        None,
        "evaluations without improvement before the run stops and keeps its best weights. Without it, the run keeps "
        "its last weights",
        least=1,
        group=TRAINING,
    )
    keep_every: int | None = option(
        None,
        "epochs between encoder files that are kept in the run's folder, as encoders/epoch-0010.safetensors",
        least=1,
        group=TRAINING,
        rare=True,
    )
    log: str | list[str] | None = option(
        None, "experiment trackers, any number of them: tensorboard, wandb, mlflow, trackio", group=TRAINING
    )
    randaugment: float = option(
        0.0,
        "magnitude of RandAugment, up to 10 (DeiT and MP3: 9); 0 switches it off",
        least=0,
        most=MAX_MAGNITUDE,
        group=TRAINING,
        rare=True,
    )
    randaugment_std: float = option(0.5, "standard deviation of that magnitude", least=0, group=TRAINING, rare=True)
    seed: int = option(0, "random seed", least=0, group=TRAINING)
    split_seed: int | None = option(
        None,
        "random seed of the held-out split, to compare runs of several seeds on the same images; else --seed",
        group=TRAINING,
    )

    device: Literal["cpu", "cuda", "mps"] | Auto = option(
        "auto", "device for training; auto: a GPU if there is one", group=MACHINE
    )
    devices: int | Auto = option(
        "auto",
        "processes per machine, with one device each; auto: as started by torchrun or SLURM, else 1",
        least=1,
        most=1024,
        group=MACHINE,
    )
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp", "ddp, or fsdp, which shards weights, gradients and moments", group=MACHINE, rare=True
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] | Auto = option(
        "auto",
        "precision of matrix products: float32, tf32 (NVIDIA GPUs), bfloat16, or float16 for GPUs without bfloat16. "
        "Weights stay float32",
        group=MACHINE,
        rare=True,
    )
    teacher_precision: Literal["same", "bfloat16"] = option(
        "same",
        "precision of teachers and of droppos's guide, which need no gradient: same as --precision, or bfloat16",
        group=MACHINE,
        rare=True,
    )
    attention: Literal["fused", "explicit"] | Auto = option(
        "auto",
        "form of attention: torch's fused kernel, or an explicit softmax. Equal up to rounding",
        group=MACHINE,
        rare=True,
    )
    kernels: Literal["torch", "native"] | Auto = option(
        "auto",
        "attention kernels: torch, or native ones for bfloat16 on CPUs with AVX512-BF16, compiled on first use",
        group=MACHINE,
        rare=True,
    )
    compile: Compile | Auto = option(
        "auto",
        "torch.compile for stacks of blocks and for losses; graphs: as CUDA graphs, too, for small models on one GPU "
        "(experimental: not yet run on a GPU)",
        group=MACHINE,
        rare=True,
    )
    checkpointing: bool = option(
        False, "gradient checkpointing: less memory, and a third more time", group=MACHINE, rare=True
    )
    threads: int | Auto = option(
        "auto", "CPU threads per training process", least=1, most=1024, group=MACHINE, rare=True
    )
    workers: int | Auto = option(
        "auto",
        "processes that read images; 0 reads in the main process",
        least=0,
        most=1024,
        group=MACHINE,
    )
    crop_on: Literal["workers", "device"] = option(
        "workers",
        "place where random crops are resized: in the workers, or on the device, for GPUs that wait for images. Equal "
        "up to rounding",
        group=MACHINE,
        rare=True,
    )

    def check(self) -> None:
        """Refuse values of another type or out of range, and impossible combinations."""
        check_declared(self)
        refuse(self._refusals())

    def _refusals(self) -> Iterator[tuple[bool, str]]:
        """Yield combinations, and the sentence with which each of them is refused."""
        fresh = self.from_run is None and self.init is None
        yield (
            self.minutes is not None and self.epochs != "auto",
            "--minutes and --epochs both set the length of training: give one of them",
        )
        yield (
            self.epochs != "auto" and self.warmup_epochs != "auto" and self.warmup_epochs > self.epochs,
            f"--warmup_epochs {self.warmup_epochs} exceeds --epochs {self.epochs}: lower it",
        )
        yield (
            bool(self.least_rate and self.halve_every),
            "--least_rate ends the cosine, which --halve_every replaces: leave out one of them",
        )
        yield (
            self.final_weight_decay is not None and self.weight_decay == 0,
            "--final_weight_decay is reached from --weight_decay, which is 0: give one above 0, or leave it out",
        )
        yield (
            self.held_out == 0 and self.patience is not None,
            "--patience compares measures on held-out images: leave out --patience or --held_out 0",
        )
        yield (
            self.crop_scale == "native" and isinstance(self.cache, int),
            f"--cache {self.cache} shrinks images before --crop_scale native crops them: give --cache whole",
        )
        later = "changes crops after they are resized, in the workers: leave out --crop_on device"
        on_device = self.crop_on == "device"
        yield on_device and self.crop_scale in get_args(Border), f"--crop_scale {self.crop_scale} {later}"
        yield on_device and self.randaugment > 0, f"--randaugment {self.randaugment} {later}"
        yield (
            not self.randaugment and self.randaugment_std != PretrainOptions.randaugment_std,
            "--randaugment_std has no effect without --randaugment: add --randaugment 9",
        )
        yield (
            self.from_run is not None and self.init is not None,
            "--from and --init both set the initial weights: give one of them",
        )
        without, kept = "give --init timm:NAME, a file or a run, or leave it out", "which are random without --init"
        yield (
            fresh and self.train_blocks is not None,
            f"--train_blocks freezes the first blocks, {kept}: {without}",
        )
        yield (
            fresh and self.adapt not in ("auto", "all"),
            f"--adapt {self.adapt} freezes weights, {kept}: {without}",
        )
        yield (
            fresh and self.heads_first not in ("auto", 0),
            f"--heads_first keeps the encoder's weights, {kept}: {without}",
        )
        yield fresh and self.anchor > 0, f"--anchor keeps features near those of initial weights, {kept}: {without}"
        yield (
            self.adapt == "all" and self.train_blocks is not None,
            "--adapt all trains every block: leave out --train_blocks, or give --adapt blocks",
        )
        usual = PretrainOptions.lora_rank, PretrainOptions.lora_on
        yield (
            self.adapt != "lora" and (self.lora_rank, self.lora_on) != usual,
            "--lora_rank and --lora_on are for low-rank updates: add --adapt lora",
        )
        yield (
            self.adapt == "lora" and self.strategy == "fsdp",
            "--adapt lora has few weights to shard: use --strategy ddp",
        )
