"""Values by which segmentation and detection are trained, and what of them is refused."""

import pytest

from patchloom.errors import PatchloomError
from patchloom.evaluate.dense.recipes import DETECT, PROBE, SEGMENT, dense_recipe, usual_crops
from patchloom.evaluate.dense.setup import native_or_reduced, window_count


@pytest.mark.parametrize("name", [*SEGMENT, *DETECT])
def test_every_recipe_is_sound_and_resolves(name: str) -> None:
    recipe = dense_recipe(name, {**SEGMENT, **DETECT}, {})
    for device, n in (("cpu", 300), ("cuda", 20_000)):
        settled = recipe.settled(n, device, 0, 224, 16, 768)
        assert "auto" not in [value for name, value in settled.plain().items() if name != "window"]
        assert settled.size % 16 == 0 and settled.batch <= 16


def test_values_of_the_papers() -> None:
    mae = SEGMENT["mae"]
    assert (mae.steps, mae.warmup_steps, mae.batch, mae.size, mae.lr) == (160_000, 1_500, 16, 512, 1e-4)
    assert (mae.layer_decay, mae.weight_decay, mae.drop_path, mae.decay) == (0.65, 0.05, 0.1, "linear")
    assert mae.settled(20_210, "cuda", 0, 224, 16, 768).head_width == 512
    vitdet = DETECT["vitdet"]
    assert (vitdet.size, vitdet.scale, vitdet.lr, vitdet.layer_decay) == (1024, (0.1, 2.0), 3e-4, 0.75)


def test_what_auto_becomes() -> None:
    small = SEGMENT["small"].settled(300, "cpu", 0, 128, 8, 128)
    assert (small.steps, small.warmup_steps, small.batch, small.size, small.side) == (1_000, 100, 8, 192, 192)
    assert small.validation == 0.15 and small.head_width == 128
    assert SEGMENT["small"].settled(40, "cpu", 0, 128, 8, 128).validation == 0  # six images would say nothing
    assert SEGMENT["small"].settled(40, "cpu", 101, 128, 8, 128).validation == 0.15  # the data brings its own
    assert SEGMENT["small"].settled(5, "cpu", 0, 128, 8, 128).batch == 5
    assert DETECT["small"].settled(100, "cpu", 0, 100, 16, 32).size == 144  # a multiple of the patch
    assert PROBE.layer_decay == 1 and PROBE.auxiliary == 0


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


def test_the_papers_resize_to_their_window() -> None:
    assert SEGMENT["mae"].settled(20_210, "cuda", 0, 224, 16, 768).side == 512
    assert dense_recipe("mae", SEGMENT, {"size": 256}).settled(20_210, "cuda", 0, 224, 16, 768).side == 256


def test_the_warm_up_follows_the_steps() -> None:
    assert dense_recipe("mae", SEGMENT, {"steps": 16_000}).warmup_steps == 150
    assert dense_recipe("mae", SEGMENT, {"steps": 16_000, "warmup_steps": 7}).warmup_steps == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"scale": [2.0, 0.5]}, r"--scale \[2.0, 0.5\] has the larger number first"),
        ({"scale": [0.0, 1.0]}, "--scale must be 0.01 to 100"),
        ({"steps": 10, "warmup_steps": 20}, "--warmup_steps 20 is more than --steps 10"),
        ({"side": 2}, "--side must be 8 to 16384"),
        ({"size": "large"}, "size"),
        ({"betas": [0.9, 1.0]}, r"--betas must lie in \[0, 1\)"),
    ],
)
def test_values_that_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(PatchloomError, match=said):
        dense_recipe("small", SEGMENT, changes)


def test_an_unknown_recipe() -> None:
    with pytest.raises(PatchloomError, match="there is no recipe beit: choose one of small, mae, lut, droppos"):
        dense_recipe("beit", SEGMENT, {})
