"""Sets of options that cover every option of every task away from its default.

They are for the small encoders of `sweep`. `left_out` finds from the signatures what no set has.
"""

import inspect
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sweep import PLAIN, TEACHER

from patchloom.options.degradations import STRENGTHS
from patchloom.options.tasks import QUESTIONS, SHARES
from patchloom.tasks import task_class

_DECODER = {"decoder_width": 24, "decoder_heads": 3}
CANVAS = 34  # of 24 pixels, which are 0.7 of it
_MIXED = {"mask": 0.5, "blank": 0.25, "drop_positions": 0.5, "limit_context": 0.5}

# the first set of each task is empty: all defaults
OPTION_SETS: dict[str, list[dict[str, Any]]] = {
    "mae": [
        {},
        {"mask_ratio": 0.5, "normalized_pixels": False},
        {"mask_ratio": 0.9, "decoder_depth": 1, **_DECODER},
        {"mask_unit": 8},
    ],
    "crossmae": [
        {},
        {"mask_ratio": 0.5, "prediction_ratio": 0.5, "normalized_pixels": False, "encoder_maps": 2},
        {"encoder_maps": 1, "decoder_depth": 1, **_DECODER},
    ],
    "simmim": [{}, {"mask_ratio": 0.75, "mask_unit": 4}, {"mask_ratio": 0.3, "normalized_pixels": True}],
    "droppos": [
        {},
        {"mask_ratio": 0.0, "position_mask_ratio": 1.0, "sigma": 0.0, "placeholder": "zeros"},
        {"mask_ratio": 0.0, "temperature": 0.2, "smoothing": "program", "shuffle": True, "placeholder": "learned"},
        {"mask_ratio": 0.5, "position_mask_ratio": 0.5, "sigma": 2.0, "sigma_end": 1.0, "decoder_depth": 0},
        {"temperature": float("inf"), "placeholder": "foreign", "decoder_depth": 1, **_DECODER},
        {"pixels": True, "normalized_pixels": False, "pixel_decoder_depth": 1},
        {"pixels": True, "placeholder": "zeros", "decoder_depth": 0, "pixel_decoder_depth": 3},
    ],
    "mp3": [
        {},
        {"context_mask_ratio": 0.0},
        {"context_mask_ratio": 0.9, "known_positions": 0.05},
        {"known_positions": 0.5},
    ],
    "restore": [
        {},
        {"band_weight": 0.0, "band_target": "original"},
        {"band_weight": 0.5, "band_target": "grown", "normalized_pixels": False},
        {"band_weight": 1.0, "canvas": 40, "normalized_pixels": False},
        {"mask_ratio": 0.5, "scale": 0.5},
        {"mask_ratio": 0.0, "scale": [0.5, 0.75]},
        {"degradation": "masked"},
        {"degradation": "masked", "mask_ratio": 0.5, "sampling": "block", "normalized_pixels": False},
        {"degradation": "masked", "decoder_depth": 1, **_DECODER},
        {"degradation": "zoom_out"},
        {"degradation": "zoom_out", "scale": [0.5, 0.75], "mask_ratio": 0.5, "decoder_depth": 0},
        {"zoom_place": "random"},
        {"zoom_place": "random", "scale": [0.5, 0.75]},
        {"zoom_place": "centre", "target_norm": "patch"},
        {"degradation": "masked", "sampling": "centre"},
        {"degradation": "masked", "sampling": "surroundings", "mask_ratio": 0.25, "target_norm": "channel"},
        {"degradation": "zoom_out", "fill": "mirror", "target_norm": "patch"},
        {"degradation": "zoom_out", "fill": "black", "scale": [0.5, 0.75]},
        {"degradation": "zoom_out", "fill": "images", "mask_ratio": 0.5},
        {"degradation": "zoom_out", "fill": "none"},
        {"degradation": "zoom_out", "fill": "none", "mask_ratio": 0.5, "sampling": "block"},
        {"degradation": "fisheye", "canvas": 28},
        {"degradation": "fisheye", "canvas": 28, "canvas_fit": "crop"},
        {"degradation": "wave"},
        {"degradation": "wave", "amplitude": 0.2, "canvas": 28, "canvas_fit": "resize"},
        {"degradation": "wave", "amplitude": [0.0, 0.1], "mask_ratio": 0.5},
        {"degradation": "fisheye", "twist": 0.1, "sampling": "block", "mask_ratio": 0.25},
        {"degradation": "fisheye", "twist": [0.1, 0.3]},
        {"degradation": "blur"},
        {"degradation": "blur", "kernel": 5.0, "mask_ratio": 0.5},
        {"degradation": "blur", "kernel_init": "kaiming", "kernel_of": "channel"},
        {"degradation": "blur", "kernel_init": "xavier", "kernel": [3.0, 5.0]},
        {"degradation": "blur", "kernel_init": "normal", "kernel_of": "image"},
        {"degradation": "blur", "kernel": [3.0, 5.0], "decoder_depth": 0},
        {"degradation": "decolorize", "saturation": 0.6},
        {"degradation": "decolorize", "saturation": [0.0, 0.3]},
        {"degradation": "none"},
        {"degradation": "none", "mask_ratio": 0.5},
    ],
    "extrema": [
        {},
        {"mask_ratio": 0.5, "masks": 1, "loss": "byol", "momentum": 0.9, "head_width": 24, "head_out": 12},
        {"masks": 9, "mask_ratio": 0.9, "class_token": "vit", "crop": "none", "color": "none"},
        {"attention_blocks": 1, "masks": 2, "color": "second"},
        {"loss": "infonce", "class_token": "mean", "crop": "own", "color": "shared"},
        {"loss": "infonce", "temperature": 1.0, "momentum": 1.0},
        {"loss": "sigreg", "directions": 8},
        {"loss": "visreg", "gaussian_weight": 0.5, "class_token": "mean", "head_out": 8},
    ],
    "lut": [
        {},
        {"mask_ratio": 0.5, "context_weight": 1.0, "normalized_pixels": False, "momentum": 0.9, "head_width": 24},
        {"pixel_weight": 0.0, "mask_ratio": 0.9, "color": "second"},
        {"pixel_weight": 0.5, "decoder_depth": 1, **_DECODER, "color": "shared"},
        {"base": "simmim"},
        {"base": "simmim", "mask_ratio": 0.75, "mask_unit": 4, "normalized_pixels": True, "color": "own"},
        {"base": "simmim", "pixel_weight": 0.0},
        {"loss": "infonce", "temperature": 0.5},
        {"loss": "sigreg", "gaussian_weight": 0.1},
        {"loss": "visreg", "directions": 8, "base": "simmim"},
    ],
    "distill": [
        {},
        {"features_of": TEACHER, "mask_ratio": 0.75, "loss": "smooth_l1"},
        {"features_of": PLAIN, "features_model": "vit_tiny_patch16_224"},
    ],
    "latent": [
        {},
        {"layers": [2], "masks": 2, "target_blocks": 2, "target_scale": 0.1, "mask_ratio": 0.9, "momentum": 0.9},
        {"layers": [1, 2], "combine": "mean", "source": "mlp", "sampling": "inverse", "masks": 3, "loss": "mse"},
        {"sampling": "random", "mask_ratio": 0.5, "decoder_depth": 1, **_DECODER},
        {"sampling": "inverse", "decoder": "conv", "decoder_width": 48},
    ],
    "diet": [{}, {"images": 20, "smoothing": 0.0, "color": "none"}],
    "jigsaw": [{}, {"mask_ratio": 0.0}, {"mask_ratio": 0.9}],
    "part": [{}, {"pairs": 100, "head": "linear"}, {"context_mask_ratio": 0.5}],
    "loca": [{}, {"mask_ratio": 0.0, "context_ratio": 1.0, "momentum": 0.9}, {"mask_ratio": 0.9, "context_ratio": 0.1}],
    "nepa": [{}],
    "mixture": [
        {},
        {"sigma": 0.0, "decoder_depth": 1, "position_depth": 1, **_DECODER},
        {"withhold": {"mask": 0.75}, "ask": {"pixels": 1.0}, "teacher": "none"},
        {"withhold": {"blank": 0.5}, "ask": {"pixels": 1.0}},
        {"withhold": {"mask": 0.25, "blank": 0.5}, "ask": {"pixels": 2.0}, "decoder_depth": 0},
        {"withhold": {"drop_positions": 1.0}, "ask": {"positions": 1.0}, "position_depth": 0},
        {"withhold": {"drop_positions": 1.0, "limit_context": 0.5}, "ask": {"positions": 1.0}, "sigma": 2.0},
        {"withhold": _MIXED, "ask": {"pixels": 1.0, "positions": 0.5, "agreement": 0.25}},
        {"withhold": _MIXED, "ask": {"agreement": 1.0}, "teacher": "second", "momentum": 0.9},
        {"withhold": {}, "ask": {"agreement": 1.0}, "teacher": "second", "head_width": 24, "head_out": 12},
        {"withhold": {"mask": 0.5}, "ask": {"agreement": 1.0, "pixels": 1.0}, "teacher": "same"},
        {"withhold": {"zoom_in": 0.5}, "ask": {"pixels": 1.0}, "decoder_depth": 0},
        {"withhold": {"zoom_in": 0.5, "mask": 0.5}, "ask": {"pixels": 1.0}, "zoom_place": "random"},
        {"withhold": {"zoom_in": 0.5}, "ask": {"pixels": 1.0}, "zoom_place": "centre"},
        {"withhold": {"zoom_out": 0.5, "mask": 0.5}, "ask": {"pixels": 1.0}},
        {"withhold": {"zoom_out": 0.5}, "ask": {"pixels": 1.0}, "fill": "mirror"},
        {"withhold": {"zoom_out": 0.5, "blank": 0.5}, "ask": {"pixels": 1.0}, "fill": "black"},
        {"withhold": {"zoom_out": 0.5, "mask": 0.5}, "ask": {"pixels": 1.0}, "fill": "images"},
        {"withhold": {"wave": 0.1, "mask": 0.5}, "ask": {"pixels": 1.0}},
        {"withhold": {"blur": 3.0}, "ask": {"pixels": 1.0}, "kernel_init": "kaiming", "kernel_of": "channel"},
        {"withhold": {"blur": 3.0}, "ask": {"pixels": 1.0}, "kernel_init": "xavier"},
        {"withhold": {"blur": 3.0}, "ask": {"pixels": 1.0}, "kernel_init": "normal", "kernel_of": "image"},
        {"withhold": {"fisheye": 0.2, "blank": 0.5}, "ask": {"pixels": 1.0}},
        {"withhold": {"blur": 3.0, "drop_positions": 0.5}, "ask": {"positions": 1.0, "pixels": 1.0}},
        {"withhold": {"decolorize": 0.3, "limit_context": 0.5}, "ask": {"agreement": 1.0, "pixels": 1.0}},
        {"withhold": {"mask": 0.5, "blank": 0.25}, "ask": {"features": 1.0, "pixels": 1.0}, "features_of": TEACHER},
        {"withhold": {"mask": 0.5}, "ask": {"features": 1.0}, "features_of": TEACHER, "feature_loss": "smooth_l1"},
        {"withhold": {"fisheye": 0.2}, "ask": {"features": 1.0}, "features_of": TEACHER, "feature_loss": "cosine"},
        # the papers' strongest forms
        {
            **{"withhold": {"mask": 0.8}, "ask": {"agreement": 1.0}, "teacher": "second", "masks": 4, "crop": "shared"},
            **{"color": "own", "agreement_loss": "infonce", "infonce_temperature": 0.5, "class_token": "cait"},
            "attention_blocks": 1,
        },
        {
            **{"withhold": {"mask": 0.75, "drop_positions": 0.75}, "ask": {"positions": 1.0}},
            **{"sigma_end": 0.5, "position_temperature": 0.1},
        },
        {
            **{"withhold": {"zoom_in": 0.7, "mask": 0.5}, "ask": {"pixels": 1.0}, "canvas": CANVAS},
            **{"band_weight": 0.3, "band_target": "original"},
        },
        {"withhold": {"zoom_in": 0.7, "mask": 0.5}, "ask": {"pixels": 1.0}, "canvas": CANVAS, "band_target": "grown"},
        {"withhold": {"fisheye": 0.2}, "ask": {"pixels": 1.0}, "canvas": CANVAS, "canvas_fit": "crop"},
        {"withhold": {"wave": 0.2}, "ask": {"pixels": 1.0}, "canvas": CANVAS, "canvas_fit": "resize"},
        {
            **{"withhold": _MIXED | {"mask": 0.75}, "ask": {"positions": 1.0, "pixels": 1.0, "agreement": 1.0}},
            **{"masks": 3, "class_token": "vit", "position_temperature": 0.5, "agreement_loss": "sigreg"},
            "directions": 8,
        },
        {
            **{
                "withhold": {"mask": 0.5},
                "ask": {"agreement": 1.0, "features": 1.0},
                "features_of": TEACHER,
                "masks": 2,
            },
            **{"agreement_loss": "visreg", "gaussian_weight": 0.5, "teacher": "second", "color": "shared"},
        },
        {"withhold": {}, "ask": {"agreement": 1.0}, "teacher": "second", "crop": "none", "color": "second"},
        {"withhold": {"mask": 0.5}, "ask": {"agreement": 1.0}, "teacher": "second", "crop": "own", "color": "none"},
        {
            **{"withhold": {"mask": 0.5}, "ask": {"features": 1.0}},
            **{"features_of": PLAIN, "features_model": "vit_tiny_patch16_224"},
        },
    ],
}

# valid keys of options that are dicts
_NAMES = {"withhold": {*SHARES, *STRENGTHS}, "ask": {*QUESTIONS}}


def mixture_of(question: str) -> dict[str, Any]:
    """Return the first options of a mixture with only this question, for images and for recordings."""
    for options in OPTION_SETS["mixture"]:
        # some degradations need images with three channels
        if options.get("ask", {}).keys() == {question} and not options["withhold"].keys() & STRENGTHS.keys():
            return options
    raise AssertionError(f"add options to OPTION_SETS that ask {question} alone, without a degradation")


def left_out(name: str) -> list[str]:
    """Return options of task ``name`` that no set covers: an option, a choice, or a type of value."""
    cls, sets = task_class(name), OPTION_SETS[name]
    hints, missing = get_type_hints(cls.__init__), []
    for option, parameter in inspect.signature(cls).parameters.items():
        if option == "encoder":
            continue
        met = [one[option] for one in sets if option in one]
        words, kinds = _taken(hints[option])
        words -= {parameter.default, "auto"}  # auto is only ever a default
        missing += [f"{option}={word}" for word in words if word not in met]
        for kind in kinds:
            of_kind = [one for one in met if type(one) is kind and one != parameter.default]
            if not of_kind:
                missing.append(f"{option} as a {kind.__name__}")
        if dict in kinds:
            used = {key for one in met for key in one}
            missing += [f"{option}: {key}" for key in _NAMES[option] - used]
    return missing


def _taken(hint: Any) -> tuple[set[Any], set[type]]:
    """Return the choices in a type hint and the types it accepts besides."""
    if get_origin(hint) is Literal:
        return set(get_args(hint)), set()
    if get_origin(hint) in (list, dict) or not get_args(hint):
        return set(), {get_origin(hint) or hint} - {NoneType}
    parts = [_taken(one) for one in get_args(hint)]
    return set().union(*(words for words, _ in parts)), set().union(*(kinds for _, kinds in parts))
