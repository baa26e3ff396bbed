"""Options that a task cannot be built with: one sentence that names the option or the remedy."""

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from mixing import make as mixture
from small import small

from patchloom.errors import PatchloomError
from patchloom.tasks import TASKS, encoder_defaults, ready_tasks, task_class

WITHOUT_POSITIONS = {name for name in ready_tasks() if "positions" in encoder_defaults({"name": name})}
OBLONG = {"size": (8, 12), "p": (8, 1)}
ONE_PIXEL = {"p": 1, "size": (8, 8), "channels": 1}

MASKS = [
    ("mae", {"mask_ratio": 0.0}, "masks nothing"),
    ("mae", {"decoder_width": 30, "decoder_heads": 4}, "30 wide and 2 blocks deep with 4 heads"),
    ("mae", {"decoder_width": 30, "decoder_heads": 3}, "30 wide"),
    ("mae", {"decoder_width": 0}, "decoder_width must be 4 to 65,536, not 0"),
    ("mae", {"decoder_heads": 0}, "decoder_heads must be 1 to 65,536, not 0"),
    ("mae", {"decoder_depth": -1}, "decoder_depth must be 0 to 1,000, not -1"),
    ("mae", {"decoder_depth": 1001}, "0 to 1,000, not 1001"),
    ("mae", {"decoder_width": 2**16 + 4}, "4 to 65,536"),
    ("mae", ONE_PIXEL, "patches of one pixel"),
    ("mae", {"mask_unit": 6}, "6 pixels do not fit 8x8 patches of 4 pixels.* a multiple of 4"),
    ("mae", {"mask_unit": 0}, "0 pixels do not fit"),
    ("mae", {"mask_unit": 32}, "none of 1 mask units"),
    ("mae", {"mask_unit": 8, **OBLONG}, "8x1 pixels are not: leave out --task.mask_unit"),
    ("simmim", {"size": (20, 32), "mask_unit": 8}, "do not fit 5x8"),
    ("simmim", {"size": (32, 20), "mask_unit": 8}, "do not fit 8x5"),
    ("simmim", {**ONE_PIXEL, "normalized_pixels": True}, "patches of one pixel"),
    ("crossmae", {"prediction_ratio": 0.8}, "prediction_ratio .* at most the mask ratio of 0.75, not 0.8"),
    ("crossmae", {"prediction_ratio": 0.0}, "prediction_ratio"),
    ("crossmae", {"encoder_maps": 4}, "3 feature maps, .* 1 to 3, not 4"),
    ("crossmae", {"encoder_maps": 0}, "1 to 3, not 0"),
    ("crossmae", ONE_PIXEL, "patches of one pixel"),
]
POSITIONS = [
    ("droppos", {"position_mask_ratio": 0.0}, "position_mask_ratio"),
    ("droppos", {"position_mask_ratio": 1.1}, "position_mask_ratio"),
    ("droppos", {"temperature": 0.0}, "temperature must be above 0"),
    ("droppos", {"sigma": -1.0}, "sigma must be 0 or more"),
    ("droppos", {"sigma": float("inf")}, "sigma must be 0 or more and finite"),
    ("droppos", {"sigma_end": 2.0}, "sigma_end .* which is 1, not 2"),
    ("droppos", {"sigma_end": -0.5}, "sigma_end"),
    ("droppos", {"mask_ratio": 0.0, "pixels": True}, "no pixels are hidden"),
    ("droppos", {"smoothing": "program"}, "16 here, and the grid has 64"),
    ("droppos", {"smoothing": "program", "size": (16, 32)}, "4x8 patches"),
    ("droppos", {"smoothing": "program", **OBLONG, "size": (8, 1)}, "square"),
    ("droppos", {"mask_ratio": 0.98}, "leaves 1 of 64 .* 2 are needed"),
    ("droppos", {**ONE_PIXEL, "pixels": True}, "patches of one pixel"),
    ("droppos", {"size": (4, 4)}, "images of 1 patch leave nothing"),
    ("droppos", {"positions": "none"}, "positions sincos"),
    ("mp3", {"positions": "sincos"}, "mp3 withholds every position.* --positions none, or .*known_positions"),
    ("mp3", {"known_positions": 0.25}, "positions sincos"),
    ("mp3", {"context_mask_ratio": 1.0}, "context_mask_ratio must be 0 or more and below 1"),
    ("mp3", {"context_mask_ratio": 0.99}, "context_mask_ratio 0.99 leaves no"),
    ("mp3", {"context_mask_ratio": -0.1}, "context_mask_ratio must be"),
    ("mp3", {"positions": "sincos", "known_positions": 1.0}, "known_positions must be .* not 1"),
    ("mp3", {"positions": "sincos", "known_positions": -0.1}, "known_positions"),
    ("mp3", {"size": (4, 4)}, "one patch"),
    ("jigsaw", {"positions": "learned"}, "jigsaw withholds every position.* use --positions none$"),
    ("jigsaw", {"mask_ratio": 0.98}, "leaves 1 of 64 patches"),
    ("part", {"positions": "sincos"}, "part withholds every position"),
    ("part", {"size": (4, 4)}, "one patch has no pairs"),
    ("part", {"pairs": 0}, "pairs must be 1 to 4096"),
    ("part", {"pairs": 4097}, "pairs must be 1 to 4096"),
    ("part", {"context_mask_ratio": 1.0}, "context_mask_ratio must be"),
    ("part", {"context_mask_ratio": 0.999}, "leaves no patch as context"),
    ("part", {"context_mask_ratio": -0.5}, "context_mask_ratio must be"),
    ("loca", {"positions": "none"}, "positions sincos"),
    ("loca", {"positions": "learned"}, "must be fixed"),
    ("loca", {"context_ratio": 0.0}, "context_ratio must be above 0 and at most 1"),
    ("loca", {"context_ratio": 1.5}, "context_ratio must be"),
    ("loca", {"context_ratio": 0.01}, "at least 0.0156"),
    ("nepa", {"size": (4, 4)}, "one patch has no next patch"),
]
DEGRADED = [
    ("restore", {"degradation": "masked", "mask_ratio": 0.0}, "masks nothing"),
    ("restore", {"size": (8, 8), "degradation": "masked", "sampling": "block", "mask_ratio": 0.25}, "masks nothing"),
    ("restore", {"degradation": "blur", "sampling": "centre"}, "sampling centre has no effect"),
    ("restore", {"size": (8, 8), "degradation": "masked", "sampling": "surroundings"}, "leaves no surroundings"),
    ("restore", {"target_norm": "patch", "normalized_pixels": False}, "target_norm has no effect"),
    ("restore", {"band_weight": 1.5}, "band_weight .* not 1.5"),
    ("restore", {"band_weight": -0.1}, "band_weight"),
    ("restore", {"mask_ratio": 0.0, "band_target": "grown"}, "band_target has no effect"),
    ("restore", {"size": (8, 8), "p": 1}, "patches of one pixel"),
    ("restore", {"degradation": "decolorize", "channels": 1}, "3 channels, and these have 1"),
    ("restore", {"scale": 0.0}, r"scale of zoom_in .* not \[0.0\]"),
    ("restore", {"degradation": "zoom_out", "scale": []}, "scale of zoom_out"),
    ("restore", {"degradation": "fisheye", "twist": -0.1}, "twist of fisheye"),
    ("restore", {"degradation": "fisheye", "twist": 1.1}, "twist of fisheye"),
    ("restore", {"degradation": "wave", "amplitude": 1.5}, "amplitude of wave"),
    ("restore", {"degradation": "wave", "amplitude": -0.1}, "amplitude of wave"),
    ("restore", {"degradation": "blur", "kernel": 4}, "kernel of blur must be odd"),
    ("restore", {"degradation": "blur", "kernel": 3.5}, "kernel of blur"),
    ("restore", {"degradation": "blur", "kernel": 33}, "kernel of blur"),
    ("restore", {"degradation": "blur", "kernel": -1}, "kernel of blur"),
    ("restore", {"degradation": "decolorize", "saturation": 1.2}, "saturation of decolorize"),
    ("restore", {"degradation": "decolorize", "saturation": -0.2}, "saturation of decolorize"),
    ("restore", {"degradation": "blur", "scale": 0.5}, "scale is not for the degradation blur"),
    ("restore", {"fill": "black"}, "fill is not for the degradation zoom_in"),
    ("restore", {"degradation": "zoom_out", "kernel_init": "xavier"}, "kernel_init is not for"),
    ("restore", {"degradation": "fisheye", "canvas_fit": "crop"}, "canvas_fit is for a --task.canvas"),
    ("restore", {"canvas_fit": "crop"}, "canvas_fit is not for the degradation zoom_in"),
    ("restore", {"degradation": "zoom_out", "fill": "none", "scale": [0.5, 0.7]}, "fewer than 8x8"),
    ("restore", {"degradation": "zoom_out", "fill": "none", "scale": 0.99}, r"one number .* not \[0.99\]"),
    ("restore", {"canvas": 37}, "canvas 37 .* above 32 by an even number"),
    ("restore", {"canvas": 30}, "canvas 30"),
    ("restore", {"canvas": 40, "scale": 0.5}, "without --task.scale"),
    ("restore", {"degradation": "blur", "canvas": 40}, "canvas 40 does not go with blur"),
]
VIT = {"encoder": {"class_token": False}}
AGREEMENT = [
    ("extrema", {"masks": 0}, "no 0 disjoint masks of 12 .* in 64: .* 1 to 5"),
    ("extrema", {"masks": 22, "mask_ratio": 0.95}, "1 to 21"),
    ("extrema", {"attention_blocks": 0}, "attention_blocks must be 1 to 65,536, not 0"),
    ("extrema", {"loss": "infonce", "temperature": 0.0}, "temperature must be above 0"),
    ("extrema", {"loss": "byol", "temperature": 0.2}, "temperature has no effect"),
    ("extrema", {"loss": "byol", "directions": 8}, "directions has no effect"),
    ("extrema", {"loss": "sigreg", "gaussian_weight": 0.0}, "gaussian_weight"),
    ("extrema", {"loss": "sigreg", "gaussian_weight": 1.0}, "gaussian_weight"),
    ("extrema", {"loss": "visreg", "directions": 0}, "directions must be 1 to 65,536"),
    ("extrema", {"loss": "sigreg", "momentum": 0.9}, "momentum has no effect"),
    ("extrema", {"momentum": -0.1}, "momentum must be 0 to 1"),
    ("extrema", {"momentum": 1.1}, "momentum must be 0 to 1"),
    ("extrema", {"class_token": "vit", **VIT}, "class_token vit needs"),
    ("extrema", {"head_width": 0}, "head_width must be 1 to"),
    ("extrema", {"head_out": 0}, "head_out must be 1 to"),
    ("lut", {"mask_ratio": 0.4}, "leaves 38 of 64 mask units .*raise --task.mask"),
    ("lut", {"base": "simmim", "mask_ratio": 0.4}, "leaves 9 of 16"),
    ("lut", {"base": "simmim", "mask_ratio": 0.97}, "leaves 0 of 16 .*lower --task.mask_ratio"),
    ("lut", {"context_weight": 0.0}, "context_weight must be above 0"),
    ("lut", {"context_weight": -1.0}, "context_weight must be above 0"),
    ("lut", {"pixel_weight": -1.0}, "pixel_weight must be 0 or more"),
    ("lut", {"mask_unit": 8}, "mask_unit has no effect"),
    ("lut", {"pixel_weight": 0.0, "decoder_depth": 2}, "decoder_depth has no effect"),
    ("lut", {"base": "simmim", "decoder_width": 32}, "decoder_width has no effect"),
    ("lut", ONE_PIXEL, "patches of one pixel"),
    ("latent", {"layers": [3]}, r"layers \[3\] .* from 1 to 2"),
    ("latent", {"layers": []}, "layers"),
    ("latent", {"layers": [2, 1]}, "layers"),
    ("latent", {"layers": [0, 1]}, "layers"),
    ("latent", {"masks": 0}, "masks must be 1 to 1,000, not 0"),
    ("latent", {"masks": 1001}, "masks must be 1 to"),
    ("latent", {"mask_ratio": 0.5}, "leaves 32 .* 4 blocks of 11 patches only 20: give --task.mask_ratio 0.6875"),
    ("latent", {"target_blocks": 6}, "6 blocks of 11 .* 1 to 5"),
    ("latent", {"target_blocks": 0}, "0 blocks"),
    ("latent", {"target_scale": 1.0}, "target_scale must be .* not 1"),
    ("latent", {"target_scale": 0.0}, "target_scale must be .* not 0"),
    ("latent", {"size": (4, 4)}, "block of 1 of 1 patches"),
    ("latent", {"sampling": "random", "target_blocks": 2}, "target_blocks has no effect"),
    ("latent", {"decoder": "conv", "decoder_heads": 2}, "decoder_heads has no effect"),
    ("latent", {"decoder": "conv", "decoder_depth": 0}, "learns nothing"),
    ("diet", {"smoothing": 1.0}, "smoothing"),
    ("diet", {"smoothing": -0.1}, "smoothing"),
    ("diet", {"images": 0}, "images must be 1 to 65,536"),
    ("diet", {"images": 70_000}, "images must be 1 to 65,536"),
]


@pytest.mark.parametrize(("name", "options", "words"), MASKS + POSITIONS + DEGRADED + AGREEMENT)
def test_impossible_options_are_refused(name, options, words):
    positions = {"positions": "none"} if name in WITHOUT_POSITIONS else {}
    with pytest.raises(PatchloomError, match=words):
        small(task_class(name), **positions | options)


PIXELS, PLACES, AGREE = ({"ask": {name: 1.0}} for name in ("pixels", "positions", "agreement"))
DROPPOS = {"withhold": {"mask": 0.75, "drop_positions": 0.75}, **PLACES}
EXTREMA = {"withhold": {"mask": 0.8}, **AGREE, "teacher": "second", "crop": "shared"}
RESTORE = {"withhold": {"zoom_in": 0.7, "mask": 0.75}, **PIXELS, "canvas": 46}
MIXTURES = [
    ({"withhold": {"masks": 0.5}}, "withhold has no entry masks: choose among mask, blank"),
    ({"ask": {"pixel": 1.0}}, "ask has no entry pixel: choose among pixels"),
    ({"ask": {}}, "one question or more"),
    ({"ask": {"pixels": 0.0}}, "weight above 0"),
    ({"withhold": {"mask": 1.0}, **PIXELS}, "mask must be a fraction between 0 and 1, not 1.0"),
    ({"withhold": {"blank": 0.0}, **PIXELS}, "blank must be a fraction"),
    ({"withhold": {"drop_positions": 1.5}}, "drop_positions must be a fraction"),
    ({"withhold": {"limit_context": 1}}, "limit_context must be a fraction"),
    ({"withhold": {"blur": 3, "fisheye": 0.2}, **PIXELS}, "one degradation"),
    ({"withhold": {"limit_context": 0.5, "mask": 0.5}, **PIXELS}, "after mask"),
    ({"withhold": {"drop_positions": 0.5}, **PIXELS}, "no pixels are withheld, so pixels"),
    ({"withhold": {"drop_positions": 0.5}, "ask": {"features": 1.0}}, "no pixels are withheld, so features"),
    ({"withhold": {"mask": 0.5}, **PLACES}, "add drop_positions"),
    ({"withhold": {"drop_positions": 1}, **PLACES, "positions": "sincos"}, "has positions: use --positions none"),
    ({"withhold": {"drop_positions": 0.5}, **PLACES, "positions": "none"}, "no positions: use --positions sincos"),
    ({**AGREE, "teacher": "none"}, "agreement needs a whole view"),
    ({**PIXELS, "teacher": "same"}, "teacher is not used"),
    ({"withhold": {}, **AGREE}, "student sees all that the teacher sees"),
    ({"withhold": {"blank": 0.6, "drop_positions": 0.5}, **PLACES}, "of 64 .* 39 would be blank and 32"),
    ({"withhold": {"blank": 0.99}, **PIXELS}, "every patch would be blank"),
    ({"withhold": {"mask": 1e-9}, **PIXELS}, "mask 1e-09 takes none"),
    ({"withhold": {"blank": 1e-9}, **PIXELS}, "blank 1e-09 takes none"),
    ({"withhold": {"drop_positions": 1e-9}, **PLACES}, "drop_positions 1e-09 takes none"),
    ({"momentum": 0.9}, "momentum has no effect"),
    ({"class_token": "vit"}, "class_token has no effect"),
    ({"agreement_loss": "infonce"}, "agreement_loss has no effect"),
    ({**PIXELS, "withhold": {"mask": 0.5}, "position_depth": 1}, "position_depth has no effect"),
    ({**PIXELS, "withhold": {"mask": 0.5}, "sigma_end": 0.5}, "sigma_end has no effect"),
    ({**PIXELS, "withhold": {"mask": 0.5}, "position_temperature": 0.1}, "position_temperature has no effect"),
    ({**PIXELS, "withhold": {"mask": 0.5}, "crop": "shared"}, "crop has no effect"),
    ({**PIXELS, "withhold": {"mask": 0.5}, "features_of": "timm:x"}, "features_of has no effect"),
    ({**DROPPOS, "decoder_depth": 1}, "decoder_depth has no effect"),
    ({**DROPPOS, "position_temperature": 0.0}, "position_temperature must be above 0"),
    ({"withhold": {"mask": "half"}}, "withhold cannot be .*: it takes .NAME: float"),
    ({"ask": ["pixels"]}, "ask cannot be"),
    ({**EXTREMA, "masks": 6}, "no 6 disjoint masks of 12 .* in 64: .* 1 to 5"),
    ({**RESTORE, "canvas": 64}, "0.500 of --task.canvas 64, not zoom_in 0.7"),
    ({**RESTORE, "masks": 2}, "for one mask"),
    ({**RESTORE, "ask": {"pixels": 1.0, "agreement": 1.0}}, "images of the encoder's size"),
]


@pytest.mark.parametrize(("options", "words"), MIXTURES)
def test_impossible_mixtures_are_refused(options, words):
    with pytest.raises(PatchloomError, match=words):
        mixture(**options)


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"distill", "mixture"}))
def test_unknown_words_are_refused(name):
    cls, positions = task_class(name), {"positions": "none"} if name in WITHOUT_POSITIONS else {}
    of_form = {"fill": {"degradation": "zoom_out"}, "canvas_fit": {"degradation": "wave", "canvas": 40}}
    of_form |= dict.fromkeys(("kernel_init", "kernel_of"), {"degradation": "blur"})
    for option, hint in get_type_hints(cls.__init__).items():
        kinds = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal and get_args(one) != ("auto",)]
        if kinds:
            with pytest.raises(PatchloomError, match=f"{option} cannot be nonsense"):
                small(cls, **positions, **of_form.get(option, {}) if name == "restore" else {}, **{option: "nonsense"})


def test_every_task_has_a_row_unless_it_needs_a_teacher():
    assert {name for name, *_ in MASKS + POSITIONS + DEGRADED + AGREEMENT} == TASKS.keys() - {"distill", "mixture"}
