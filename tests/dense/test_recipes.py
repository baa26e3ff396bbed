"""Recipes of segmentation and detection, and rejected values."""

from dataclasses import replace

import pytest
from refusing import refusal

from patchloom.dense.recipes import DETECT, PROBE, SEGMENT, ResolvedDenseRecipe, dense_recipe, usual_crops
from patchloom.dense.study import native_or_reduced, window_count


@pytest.mark.parametrize("name", [*SEGMENT, *DETECT])
def test_every_recipe_is_sound_and_resolves(name: str) -> None:
    recipe = dense_recipe(name, {**SEGMENT, **DETECT}, {})
    for device, n in (("cpu", 300), ("cuda", 20_000)):
        settled = recipe.settled(n, device, 0, 224, 16, 768)
        assert "auto" not in [value for name, value in settled.plain().items() if name != "window"]
        assert settled.size % 16 == 0 and settled.batch <= 32


STATED = {  # what each paper states, with the place; what it does not state is pinned by no row
    # MAE, appendix A.4 (with BEiT's) and LUT, Table E
    "mae": {"steps": 160_000, "batch": 16, "lr": 1e-4, "layer_decay": 0.65, "size": 512, "weight_decay": 0.05},
    "lut": {
        **{"steps": 160_000, "batch": 16, "lr": 1e-4, "layer_decay": 0.65, "size": 512, "weight_decay": 0.05},
        **{"warmup_steps": 1_500, "betas": (0.9, 0.999), "drop_path": 0.1, "decay": "linear"},
    },
    # DropPos, appendix A.3
    "droppos": {
        **{"steps": 80_000, "batch": 16, "lr": 7e-4, "size": 512, "weight_decay": 0.05, "warmup_steps": 1_500},
        "decay": "linear",
    },
    # Beyond Masking, section 4.4: the better of two rates
    "restore": {"steps": 160_000, "batch": 16, "lr": 3e-4, "size": 512},
    "restore-4e-4": {"steps": 160_000, "batch": 16, "lr": 4e-4, "size": 512},
    # ExtreMA, section 5.3
    "extrema": {"steps": 80_000, "batch": 16, "lr": 1e-4, "layer_decay": 0.85, "weight_decay": 0.05},
}
STATED_OF_DETECTION = {
    # DropPos, appendix A.2; the decay by layer is ViTDet's for ViT-B, whose configuration it follows
    "vitdet": {"steps": 88_750, "batch": 16, "lr": 3e-4, "size": 1024, "layer_decay": 0.7, "decay": "steps"},
    # Beyond Masking, section 4.4
    "restore": {"lr": 3e-4, "layer_decay": 0.75, "decay": "steps", "shorter": (480, 800), "longer": 1333},
    # ExtreMA's program follows CAE's (detection, Mask R-CNN, ViT-B, 1x)
    "extrema": {
        **{"lr": 3e-4, "layer_decay": 0.75, "decay": "steps", "shorter": (480, 800), "longer": 1333, "batch": 32},
        **{"weight_decay": 0.05, "drop_path": 0.2, "betas": (0.9, 0.999), "drops": (9 / 12, 11 / 12)},
    },
}


def test_values_of_the_papers() -> None:
    assert {*STATED, "small"} == {*SEGMENT} and {*STATED_OF_DETECTION, "small"} == {*DETECT}
    for known, papers in ((SEGMENT, STATED), (DETECT, STATED_OF_DETECTION)):
        for name, stated in papers.items():
            assert {field: getattr(known[name], field) for field in stated} == stated, name
    assert SEGMENT["mae"].settled(20_210, "cuda", 0, 224, 16, 768).head_width == 512
    for twelve in (DETECT["restore"], DETECT["extrema"]):  # epochs of COCO's training images
        assert twelve.steps == 12 * (118_287 // twelve.batch) and twelve.size >= 1333


DROPS = {"vitdet": (78_889, 85_463), "restore": (9 * 7_392, 11 * 7_392), "extrema": (9 * 3_696, 11 * 3_696)}


@pytest.mark.parametrize(("name", "drops"), DROPS.items())
def test_the_rate_of_detection_drops_where_the_papers_say(name: str, drops: tuple[int, int]) -> None:
    recipe = DETECT[name].settled(118_287, "cuda", 0, 224, 16, 768)
    course = recipe.course(118_287)

    def rate(update: int) -> float:  # the first one is 1
        return course.rate(update - 1)

    assert rate(1) < rate(recipe.warmup_steps - 1) < rate(recipe.warmup_steps) == pytest.approx(3e-4)
    for drop, before in zip(drops, (3e-4, 3e-5), strict=True):
        assert [rate(drop), rate(drop + 1)] == pytest.approx([before, before / 10])


def test_sides_that_do_not_act_are_left_out() -> None:
    assert {"shorter", "longer", "drops"}.isdisjoint(dense_recipe("small", DETECT, {}).plain())
    plain = dense_recipe("restore", DETECT, {}).plain()
    assert "scale" not in plain and (plain["shorter"], plain["longer"]) == ([480, 800], 1333)
    assert dense_recipe("small", DETECT, {"shorter": [64, 96]}).sides == (64, 96, 2**14)
    for changes, said in (
        ({"shorter": [96, 64]}, "larger number first"),
        ({"shorter": [0, 64]}, "0 pixels"),
        ({"longer": 64}, "without --shorter"),
    ):
        assert said in refusal(dense_recipe, "small", DETECT, changes)


def test_auto_depends_on_the_data_and_the_encoder() -> None:
    small = SEGMENT["small"].settled(300, "cpu", 0, 128, 8, 128)
    assert (small.steps, small.warmup_steps, small.batch, small.size, small.side) == (1_000, 100, 8, 192, 192)
    assert small.validation == 0.15 and small.head_width == 128
    assert SEGMENT["small"].settled(40, "cpu", 0, 128, 8, 128).validation == 0  # six images would say nothing
    assert SEGMENT["small"].settled(40, "cpu", 101, 128, 8, 128).validation == 0.15  # the data brings its own
    assert SEGMENT["small"].settled(5, "cpu", 0, 128, 8, 128).batch == 5
    assert DETECT["small"].settled(100, "cpu", 0, 100, 16, 32).size == 144  # a multiple of the patch
    assert PROBE.layer_decay == 1 and PROBE.auxiliary == 0
    assert SEGMENT["mae"].settled(20_210, "cuda", 0, 224, 16, 768).side == 512  # as papers resize
    assert dense_recipe("mae", SEGMENT, {"size": 256}).settled(20_210, "cuda", 0, 224, 16, 768).side == 256
    assert dense_recipe("mae", SEGMENT, {"steps": 16_000}).warmup_steps == 150
    assert dense_recipe("mae", SEGMENT, {"steps": 16_000, "warmup_steps": 7}).warmup_steps == 7


def test_windows_of_an_image() -> None:
    assert [window_count(one, None, 144) for one in ((144, 144), (145, 100), (512, 512), (360, 480))] == [1, 2, 25, 20]
    assert window_count((512, 1024), 144, 144) == 3


@pytest.mark.parametrize(
    ("image", "tests", "side", "said"),
    [
        ((96, 120), 1_000, 144, ""),  # smaller images are enlarged, as training was on crops of that size
        ((145, 150), 1_000, "native", ""),
        ((512, 512), 1_000, "native", ""),
        ((512, 512), 4_000, 336, "100,000 windows"),
        ((576, 576), 10, "native", ""),
        ((2048, 2048), 10, 576, "less than 1/16"),
        ((2048, 2048), 10**6, 144, "less than 1/16"),
    ],
)
def test_images_are_reduced_no_further_than_time_asks(
    image: tuple[int, int], tests: int, side: int | str, said: str
) -> None:
    found, why = native_or_reduced(image, 144, tests, usual_crops("cpu"), 8)
    assert found == side and said in why and bool(said) == bool(why)
    if isinstance(found, int) and found > 144:
        assert window_count(image, found, 144) * tests <= 6 * usual_crops("cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"scale": [2.0, 0.5]}, "--scale [2.0, 0.5] has the larger number first"),
        ({"drops": [0.9, 0.8]}, "--drops [0.9, 0.8] has the larger number first"),
        ({"scale": [0.0, 1.0]}, "--scale must be 0.01 to 100"),
        ({"steps": 10, "warmup_steps": 20}, "--warmup_steps 20 is more than --steps 10"),
        ({"side": 2}, "--side must be 8 to 16,384"),
        ({"size": "large"}, "size"),
        ({"betas": [0.9, 1.0]}, "--betas must be 0 or more and below 1"),
    ],
)
def test_bad_values_are_rejected(changes: dict[str, object], said: str) -> None:
    assert said in refusal(dense_recipe, "small", SEGMENT, changes)


def test_an_unknown_recipe_is_rejected() -> None:
    assert "choose one of small, mae, lut, droppos" in refusal(dense_recipe, "beit", SEGMENT, {})


@pytest.mark.parametrize("recipe", [SEGMENT["small"], DETECT["small"]])
def test_auto_cannot_stand_in_a_resolved_recipe(recipe):
    settled = recipe.settled(300, "cpu", 0, 128, 8, 128)
    assert isinstance(settled, ResolvedDenseRecipe) and settled.plain().keys() == recipe.plain().keys()
    for name in ("steps", "warmup_steps", "batch", "size", "validation", "head_width"):
        with pytest.raises(ValueError, match=f"{name} is auto"):
            replace(settled, **{name: "auto"})
