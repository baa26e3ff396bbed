"""What `claims.py` tests: the arms that are trained, and the papers' claims as comparisons of them.

All of it was fixed before the study ran: which arms are compared, by which measure, in which direction, and with how
many seeds. A comparison that was added later says so in its claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEEDS = 3
EPOCHS = 8  # of 4,900 images, in 1,224 updates
IMAGES = 500  # of each class, to train on without labels, to learn classes from, and to test on

# the encoder and the training that all arms have in common: MP3's 64 positions of CIFAR images, a small ViT
SAME: dict[str, Any] = {
    "model": {"name": "nano", "embed_dim": 96, "depth": 4, "num_heads": 3},
    "img_size": 32,
    "patch_size": 4,
    "batch_size": 32,
    "held_out": 0.02,
    "precision": "float32",
    "attention": "fused",
    "compile": False,
    "cache": "whole",
    "device": "cpu",
    "threads": 1,
    "workers": 0,
}

# name -> what it is; accuracies are in % of the test images
MEASURES = {
    "few": "fine-tuned with 500 labels",
    "all": "fine-tuned with 5,000 labels",
    "linear": "linear probe, 5,000 labels",
    "knn": "kNN (k = 20), 5,000 labels",
}
FROZEN = ("linear", "knn")


@dataclass(frozen=True)
class Arm:
    """What is trained and measured, with each seed.

    Attributes:
        task: the pretext task and its options; empty where nothing is pre-trained.
        measures: of `MEASURES`; linear and knn come together.
        of: the arm whose encoder it takes, where it pre-trains none of its own.
        positions: how the encoder is told positions in fine-tuning, as `patchloom evaluate finetune` takes it.
        members: of an ensemble: arms, and by how much the seed of each is counted up.
        time_of: an arm that sets the time: this one trains as long, by paces measured in turns.
        teacher: the arm that gives ``features_of``, of the same seed.
        pooling: of the frozen features.
    """

    task: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = ("few", *FROZEN)
    of: str = ""
    positions: str = "auto"
    members: tuple[tuple[str, int], ...] = ()
    time_of: str = ""
    teacher: str = ""
    pooling: str = "mean"


EVERY = ("few", "all", *FROZEN)
SCRATCH = "from scratch"


def _task(name: str, measures: tuple[str, ...] = ("few", *FROZEN), **options: Any) -> Arm:
    return Arm({"name": name, **options}, measures)


def _restore(degradation: str, **options: Any) -> Arm:
    return _task("restore", degradation=degradation, **options)


# arms by their names; those with options are named by them
ARMS: dict[str, Arm] = {
    "mae": _task("mae", EVERY),
    "simmim": _task("simmim", EVERY),
    "droppos": _task("droppos", EVERY),
    "mp3": _task("mp3", EVERY),
    "restore": _task("restore", EVERY),
    "extrema": _task("extrema", EVERY),
    "lut": _task("lut", EVERY),
    SCRATCH: Arm(measures=("few", "all"), of="mae"),
    # DropPos
    "droppos, γ 0": _task("droppos", EVERY, mask_ratio=0.0, temperature=float("inf")),
    "droppos, γ_pos 1": _task("droppos", EVERY, position_mask_ratio=1.0),
    "droppos, no smoothing": _task("droppos", EVERY, sigma=0.0),
    "droppos, no guide": _task("droppos", EVERY, temperature=float("inf")),
    "droppos, and pixels": _task("droppos", EVERY, pixels=True),
    # MP3
    "mp3, η 0": _task("mp3", EVERY, context_mask_ratio=0.0),
    "mp3, relative positions": Arm(measures=("all",), of="mp3", positions="relative"),
    "mp3, no positions": Arm(measures=("all",), of="mp3", positions="none"),
    "mp3 and mae": Arm(measures=("all",), members=(("mp3", 0), ("mae", 0))),
    "mae and mae": Arm(measures=("all",), members=(("mae", 0), ("mae", 1))),
    "mp3 and mp3": Arm(measures=("all",), members=(("mp3", 0), ("mp3", 1))),
    # Beyond Masking
    "masked": _restore("masked"),
    "zoomed-in": _restore("zoom_in", mask_ratio=0.0),
    "zoomed-out": _restore("zoom_out"),
    "fisheye": _restore("fisheye"),
    "blurred": _restore("blur"),
    "de-colorized": _restore("decolorize"),
    # ExtreMA
    "extrema, 1 mask": Arm({"name": "extrema", "masks": 1}, time_of="extrema"),
    "extrema, γ 0.5": _task("extrema", mask_ratio=0.5, masks=2),
    "extrema, γ 0.8, 2 masks": _task("extrema", mask_ratio=0.8, masks=2),
    "extrema, no crops": _task("extrema", crop="none"),
    "extrema, no colours": _task("extrema", color="none"),
    "extrema, neither": _task("extrema", crop="none", color="none"),
    "extrema, the mean": _task("extrema", class_token="mean"),
    # LUT
    "context alone": _task("lut", pixel_weight=0.0),
    "lut on simmim": _task("lut", base="simmim"),
    # features
    "features of mae": Arm({"name": "distill"}, time_of="mae", teacher="mae"),
}


@dataclass(frozen=True)
class Comparison:
    """One arm said to be better than another, by one measure."""

    better: str
    worse: str
    measure: str


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it is tested.

    Attributes:
        title: in a few words.
        source: paper, and table or section.
        published: its numbers, in a sentence.
        hypothesis: that the comparisons test.
        comparisons: those that decide it; each has a verdict of its own.
        beside: further measures that are shown for the same arms, and decide nothing.
        tries: what was found of comparisons that did not hold, after the study.
    """

    title: str
    source: str
    published: str
    hypothesis: str
    comparisons: tuple[Comparison, ...]
    beside: tuple[str, ...] = FROZEN
    tries: str = ""

    @property
    def arms(self) -> tuple[str, ...]:
        """Those that are compared, in the order in which they are named."""
        return tuple(dict.fromkeys(name for one in self.comparisons for name in (one.better, one.worse)))


def _over(measure: str, *pairs: tuple[str, str]) -> tuple[Comparison, ...]:
    return tuple(Comparison(better, worse, measure) for better, worse in pairs)


TASKS = ("mae", "simmim", "droppos", "mp3", "restore", "extrema", "lut")
_FROM_SCRATCH = tuple((task, SCRATCH) for task in TASKS)

# in the order in which they are run
CLAIMS: dict[str, Claim] = {
    "scratch": Claim(
        "Pre-training beats training from scratch",
        "all five; MP3, Table 3",
        "MP3 on CIFAR-100, 2,000 epochs: 73.4 from scratch, 84.0 MP3, 84.5 MAE; on Tiny ImageNet 57.6 and 72.8.",
        "Every task's encoder, fine-tuned with few labels and with all, is better than the same from scratch.",
        _over("few", *_FROM_SCRATCH) + _over("all", *_FROM_SCRATCH),
    ),
    "droppos": Claim(
        "DropPos: masks, dropped positions, smoothing, attention, pixels",
        "DropPos, Tables 1-4",
        "The paper's defaults (γ 0.75, γ_pos 0.75, σ from 1 to 0, τ 0.1) are the best of each table.",
        "Fine-tuned with all labels, the default is better than without masks, with all positions dropped, without "
        "smoothing, and without attentive reconstruction; and it is better still with MAE's pixels.",
        _over(
            "all",
            ("droppos", "droppos, γ 0"),
            ("droppos", "droppos, γ_pos 1"),
            ("droppos", "droppos, no smoothing"),
            ("droppos", "droppos, no guide"),
            ("droppos, and pixels", "droppos"),
        ),
        ("few", *FROZEN),
    ),
    "mp3": Claim(
        "MP3: context, positions in fine-tuning, ensembles",
        "MP3, Fig. 4, Table 3, section 4.2.3",
        "CIFAR-100: relative 84.2, absolute 84.0, no positions 82.6. ImageNet: MP3 83.0 and MAE 82.7, together 84.0.",
        "η > 0 is better than η 0; relative positions in fine-tuning better than absolute ones, and these better than "
        "none; MP3 and MAE together better than two of either.",
        _over(
            "all",
            ("mp3", "mp3, η 0"),
            ("mp3, relative positions", "mp3"),
            ("mp3", "mp3, no positions"),
            ("mp3 and mae", "mae and mae"),
            ("mp3 and mae", "mp3 and mp3"),
        ),
        ("few", *FROZEN),
    ),
    "restore": Claim(
        "Beyond Masking: masking and zooming in, and the order of the degradations",
        "Beyond Masking, Tables 1-2",
        "ViT-B, 300 epochs: masked 82.9, zoomed-in 82.7, distorted 82.5, zoomed-out 82.2, blurred 81.8, de-colorized "
        "81.4, masked and zoomed-in 83.2.",
        "Masking and zooming in together is better than either, and each degradation better than the next one of the "
        "paper's order.",
        _over(
            "few",
            ("restore", "masked"),
            ("restore", "zoomed-in"),
            ("masked", "zoomed-in"),
            ("zoomed-in", "fisheye"),
            ("fisheye", "zoomed-out"),
            ("zoomed-out", "blurred"),
            ("blurred", "de-colorized"),
            ("masked", "blurred"),
            ("masked", "de-colorized"),
        ),
    ),
    "extrema": Claim(
        "ExtreMA: several masks, extreme ratios, colours before crops, class attention",
        "ExtreMA, Tables 2-4",
        "Several masks of an image and ratios of 0.75 to 0.9 are the best; a shared crop with colours of each view's "
        "own is the best augmentation; class attention works where averaging takes a shortcut.",
        "Five masks are better than one that trains as long; γ 0.8 better than 0.5 with as many masks; colours help, "
        "and crops; class attention is better than the mean.",
        _over(
            "linear",
            ("extrema", "extrema, 1 mask"),
            ("extrema, γ 0.8, 2 masks", "extrema, γ 0.5"),
            ("extrema", "extrema, no colours"),
            ("extrema", "extrema, no crops"),
            ("extrema, no crops", "extrema, no colours"),
            ("extrema, no colours", "extrema, neither"),
            ("extrema", "extrema, the mean"),
        ),
        ("knn", "few"),
    ),
    "lut": Claim(
        "LUT: the broader context",
        "LUT, Tables A-C",
        "ViT-B, 100 epochs: MAE 82.1, LUT 82.6, the context alone 82.0; SimMIM 81.6, with the context 81.8.",
        "The context loss adds to MAE and to SimMIM, and is less by itself.",
        _over("few", ("lut", "mae"), ("lut", "context alone"), ("lut on simmim", "simmim")),
    ),
    "features": Claim(
        "A frozen teacher's features are a better target than pixels",
        "EVA (Fang et al. 2023), MaskDistill",
        "Both papers: features of CLIP are the better target. Here the teacher is `mae` of the same seed, whose own "
        "time is not counted.",
        "Asked for the features of `mae` for as long as `mae` trained on pixels, an encoder gets better "
        "than its teacher.",
        _over("few", ("features of mae", "mae")),
    ),
}
