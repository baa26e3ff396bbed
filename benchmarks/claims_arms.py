"""Arms of `claims.py`: pre-training and measures. All share the sizes and the training of `SAME`.

An arm whose declaration changed after its results were stored is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SEEDS = 3
EPOCHS = 8  # of 4,900 images, in 1,224 updates
IMAGES = 500  # per class: for pre-training without labels, for training with labels, and for the test

# encoder and training of all arms: MP3's 64 positions of CIFAR images, a small ViT
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

# descriptions of the measures, which are shares of the test images
MEASURES = {
    "few": "fine-tuned with 500 labels",
    "all": "fine-tuned with 5,000 labels",
    "linear": "linear probe of the mean of the patch tokens, 5,000 labels",
    "attentive": "attentive probe of the patch tokens, 5,000 labels of which 750 choose the epoch (`patchloom evaluate "
    "attentive`, recipe `small`, in float32)",
    "instance": "linear probe of the image's representation in ExtreMA (class attention or mean), 5,000 labels",
    "knn": "kNN (k = 20) of the mean of the patch tokens, 5,000 labels",
    "positions": "accuracy of the run's own task on withheld positions, mean over 16 pairs of γ and γ_pos "
    "(chance 2.35 %)",
}
FROZEN = ("linear", "attentive", "knn")
USUAL = ("few", *FROZEN)
EVERY = ("few", "all", *FROZEN)

# the whole encoder and a head, by the recipe small; nothing is held out, so the last epoch is tested
FINETUNING = {"batch_size": 32, "validation": 0.0, "precision": "float32", "device": "cpu", "workers": 0}
LENGTHS: dict[str, dict[str, Any]] = {"few": {"epochs": 20, "max_train": 500}, "all": {"epochs": 4}}
# "as long": additional updates for those of pre-training, 1,455 in all with few labels (the sum is 1,524), and 1,872
# with all (the sum is 1,848); from scratch without lower rates for lower layers, which suit only pre-trained layers
LONGER: dict[str, dict[str, Any]] = {"few": {"epochs": 97}, "all": {"epochs": 12}}
EVEN: dict[str, dict[str, Any]] = {measure: {"layer_decay": 1.0} for measure in LENGTHS}
AS_LONG = {measure: {**length, **EVEN[measure]} for measure, length in LONGER.items()}


@dataclass(frozen=True)
class Arm:
    """Arm of the study, run with each seed.

    Attributes:
        task: pretext task and its options; empty without pre-training.
        measures: names in `MEASURES`.
        of: arm whose encoder it uses instead of pre-training one.
        fresh: whether it uses only the shape of that encoder, with new weights.
        positions: kind of positions in fine-tuning, an option of `patchloom evaluate finetune`.
        finetuning: changes of `LENGTHS` for some measures.
        members: members of an ensemble: arms, and the offsets of their seeds.
        times: length of pre-training in multiples of `EPOCHS`.
        time_of: arm with the same training time, by speeds measured in turns.
        teacher: arm whose run with the same seed is ``features_of``.
    """

    task: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = USUAL
    of: str = ""
    fresh: bool = False
    positions: str = "auto"
    finetuning: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    members: tuple[tuple[str, int], ...] = ()
    times: float = 1
    time_of: str = ""
    teacher: str = ""

    @property
    def others(self) -> tuple[str, ...]:
        """The arms that it needs."""
        return tuple(name for name in (self.of, self.time_of, self.teacher, *(one for one, _ in self.members)) if name)


SCRATCH, SCRATCH_LONG, UNTRAINED = "from scratch", "from scratch, as long", "untrained"
SCRATCH_EVEN = "from scratch, even rates"
TUNED_LONG, MAE_LONG = "mae, fine-tuned as long", "mae, three times as long"


def _task(name: str, measures: tuple[str, ...] = USUAL, times: float = 1, **options: Any) -> Arm:
    return Arm({"name": name, **options}, measures, times=times)


def _timed(name: str, **options: Any) -> Arm:
    """Return an arm that trains as many seconds as `mae`."""
    return Arm({"name": name, **options}, time_of="mae")


def _restore(degradation: str, **options: Any) -> Arm:
    return _task("restore", degradation=degradation, **options)


def _extrema(**options: Any) -> Arm:
    return _task("extrema", (*USUAL, "instance"), **options)


def _droppos(**options: Any) -> Arm:
    """Return a DropPos arm, trained three times as long as the others because positions are learnt slowly."""
    return _task("droppos", ("all", *FROZEN, "positions"), times=3, **options)


ARMS: dict[str, Arm] = {
    "mae": _task("mae", EVERY),
    "simmim": _task("simmim", EVERY),
    "droppos": _task("droppos", EVERY),
    "mp3": _task("mp3", EVERY),
    "restore": _task("restore", EVERY),
    "extrema": _task("extrema", EVERY),
    "lut": _task("lut", EVERY),
    SCRATCH: Arm(measures=("few", "all"), of="mae", fresh=True),
    SCRATCH_LONG: Arm(measures=("few", "all"), of="mae", fresh=True, finetuning=AS_LONG),
    SCRATCH_EVEN: Arm(measures=("few", "all"), of="mae", fresh=True, finetuning=EVEN),
    UNTRAINED: Arm(measures=FROZEN, of="mae", fresh=True),
    TUNED_LONG: Arm(measures=("few", "all"), of="mae", finetuning=LONGER),
    MAE_LONG: _task("mae", EVERY, times=3),
    # LUT
    "context alone": _task("lut", pixel_weight=0.0),
    "lut on simmim": _task("lut", base="simmim"),
    "lut, three times as long": _task("lut", times=3),
    "context alone, momentum 0.996": _task("lut", pixel_weight=0.0, momentum=0.996),
    # MP3
    "mp3, η 0": _task("mp3", ("all", *FROZEN), context_mask_ratio=0.0),
    "mp3, relative positions": Arm(measures=("all",), of="mp3", positions="relative"),
    "mp3, no positions": Arm(measures=("all",), of="mp3", positions="none"),
    "mp3, tuned as long": Arm(measures=("all",), of="mp3", finetuning=LONGER),
    "mp3, relative, as long": Arm(measures=("all",), of="mp3", positions="relative", finetuning=LONGER),
    "mp3, no positions, as long": Arm(measures=("all",), of="mp3", positions="none", finetuning=LONGER),
    "mp3 and mae": Arm(measures=("all",), members=(("mp3", 0), ("mae", 0))),
    "mae and mae": Arm(measures=("all",), members=(("mae", 0), ("mae", 1))),
    "mp3 and mp3": Arm(measures=("all",), members=(("mp3", 0), ("mp3", 1))),
    # features of a frozen teacher, and pixels predicted in the same way
    "features of mae": Arm({"name": "distill"}, time_of="mae", teacher="mae"),
    "features of mae, longer": Arm({"name": "distill"}, time_of="mae", teacher=MAE_LONG),
    "pixels instead": Arm(
        {"name": "simmim", "mask_ratio": 0.4, "mask_unit": 4, "normalized_pixels": True}, time_of="mae"
    ),
    # Beyond Masking
    "masked": _restore("masked"),
    "zoomed-in": _restore("zoom_in", mask_ratio=0.0),
    "zoomed-out": _restore("zoom_out"),
    "fisheye": _restore("fisheye"),
    "blurred": _restore("blur"),
    "de-colorized": _restore("decolorize"),
    # ExtreMA
    "extrema, instance": Arm(measures=("instance",), of="extrema"),
    "extrema, 1 mask": Arm({"name": "extrema", "masks": 1}, (*USUAL, "instance"), time_of="extrema"),
    "extrema, γ 0.5, 2 masks": _extrema(mask_ratio=0.5, masks=2),
    "extrema, γ 0.8, 2 masks": _extrema(mask_ratio=0.8, masks=2),
    "extrema, no crops": _extrema(crop="none"),
    "extrema, no colours": _extrema(color="none"),
    "extrema, the mean": _extrema(class_token="mean"),
    # DropPos
    "droppos, long": _droppos(),
    "droppos, γ 0": _droppos(mask_ratio=0.0),
    "droppos, in γ 0's time": replace(_droppos(), time_of="droppos, γ 0"),
    "droppos, γ_pos 1": _droppos(position_mask_ratio=1.0),
    "droppos, no smoothing": _droppos(sigma=0.0),
    "droppos, no guide": _droppos(temperature=float("inf")),
    "droppos, and pixels": _droppos(pixels=True),
    # The family, each in mae's time
    "droppos, in mae's time": _timed("droppos"),
    "mp3, in mae's time": _timed("mp3"),
    "extrema, in mae's time": _timed("extrema"),
    "crossmae, as many epochs": _task("crossmae"),
    "crossmae": _timed("crossmae"),
    "jigsaw": _timed("jigsaw"),
    "part": _timed("part"),
    "loca": _timed("loca"),
    "bootleg": _timed("latent"),
    "i-jepa": _timed("latent", layers=[SAME["model"]["depth"]]),
    "data2vec": _timed(
        "latent", layers=[2, 3, 4], combine="mean", source="mlp", sampling="inverse", masks=4, loss="mse"
    ),
    "sigreg": _timed("extrema", loss="sigreg"),
    "visreg": _timed("extrema", loss="visreg"),
    "nepa": _timed("nepa"),
    "byol, twice as long": _task("extrema", times=2, loss="byol"),
    "infonce, twice as long": _task("extrema", times=2, loss="infonce"),
    "sigreg, twice as long": _task("extrema", times=2, loss="sigreg"),
}


def declaration(arm: str, epochs: float, images: int) -> dict[str, Any]:
    """Return everything but the code that determines the results of an arm: its settings and those of arms it needs."""
    needs = {name: declaration(name, epochs, images) for name in ARMS[arm].others}
    own = {name: value for name, value in asdict(ARMS[arm]).items() if name != "measures"}
    common = {"same": SAME, "finetuning": FINETUNING, "lengths": LENGTHS, "epochs": epochs, "images": images}
    return {"arm": own, "needs": needs, **common}
