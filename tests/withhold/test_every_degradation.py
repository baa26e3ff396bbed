"""Properties of all degradations, with independent draws per image."""

import pytest
import torch
from degrading import SIDES, SIZES, assert_close
from small import seeded

from patchloom.withhold.canvas import zoom_out
from patchloom.withhold.degradation import Degradation
from patchloom.withhold.degrade import blur, decolorize, draw_uniform, fisheye, random_kernels, wave, zoom_in
from patchloom.withhold.encoder_input import all_patches


def degrader(kind, *strengths, **form):
    """Return a function that degrades images [b c h w] by draws of a generator."""

    def degrade(images, generator=None):
        size = tuple(images.shape[2:])
        mean = images.new_zeros(images.shape[1], 1, 1)
        degradation = Degradation(kind, size, size, strengths, **form)
        given = all_patches(images, size[0] * size[1])
        return degradation(given, mean, torch.ones_like(mean), generator).images

    return degrade


ALL = {
    "zoom_in": degrader("zoom_in", 0.4, 0.7, 1.0),
    "zoom_in fixed": degrader("zoom_in", 0.7),
    "zoom_in anywhere": degrader("zoom_in", 0.4, 0.7, zoom_place="random"),
    "zoom_out": degrader("zoom_out", 0.4, 0.7),
    "zoom_out on black": degrader("zoom_out", 0.4, 0.7, fill="black"),
    "zoom_out amid others": degrader("zoom_out", 0.4, 0.7, fill="images"),
    "fisheye": degrader("fisheye", 0.2, 0.25),
    "wave": degrader("wave", 0.0, 0.1),
    "blur": degrader("blur", 1, 3, 7, kernel_of="image"),
    "decolorize": degrader("decolorize", 0.0, 0.3, 0.6),
}
each = pytest.mark.parametrize("degrade", ALL.values(), ids=ALL)


@each
def test_size_and_type_stay_and_the_input_is_not_modified(degrade):
    for dtype in (torch.float32, torch.bfloat16):
        images = torch.rand(3, 3, 21, 30).to(dtype)
        before = images.clone()
        degraded = degrade(images, seeded())
        assert degraded.shape == images.shape and degraded.dtype == dtype and degraded.isfinite().all()
        assert torch.equal(images, before) and not torch.equal(degraded, images)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 5])
@each
def test_channels_are_treated_equally(degrade, c):
    if degrade is ALL["decolorize"]:
        pytest.skip("for colours only")
    images = torch.rand(3, c, 21, 30)
    together = degrade(images, seeded())
    for i in range(c):
        assert_close(together[:, i : i + 1], degrade(images[:, i : i + 1], seeded()))


ALONE = {
    "zoom_in": (zoom_in, lambda b: (torch.linspace(0.3, 1, b),)),
    "zoom_out": (
        lambda images, *draws: zoom_out(images, SIZES, *draws),
        lambda b: (torch.arange(b) % 3, torch.arange(b), torch.arange(b).flip(0)),
    ),
    "zoom_in anywhere": (zoom_in, lambda b: (torch.full((b,), 0.4), torch.arange(2 * b).view(b, 2))),
    "wave": (wave, lambda b: (torch.linspace(0.01, 0.2, b), torch.linspace(0, 1, b))),
    "fisheye": (fisheye, lambda b: (draw_uniform(-1, 1, (b, 2), seeded()), draw_uniform(0.2, 0.4, (b,), seeded(1)))),
    "blur": (blur, lambda b: (random_kernels(SIDES, torch.arange(b) % 3, seeded()),)),
    "decolorize": (decolorize, lambda b: (torch.linspace(0, 1, b),)),
}


@pytest.mark.parametrize(("degrade", "draws"), ALONE.values(), ids=ALONE)
def test_an_image_does_not_depend_on_its_batch_mates(degrade, draws):
    b = 5
    images, drawn = torch.rand(b, 3, 21, 30), draws(b)
    together = degrade(images, *drawn)
    for i in range(b):
        assert_close(together[i : i + 1], degrade(images[i : i + 1], *(draw[i : i + 1] for draw in drawn)), 1e-6)
    other = torch.rand(b, 3, 21, 30)
    other[2] = images[2]
    assert torch.equal(degrade(other, *drawn)[2], together[2])


@each
def test_autocast_changes_nothing(degrade):
    images = torch.rand(3, 3, 121, 130)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = degrade(images, seeded())
    assert torch.equal(under, degrade(images, seeded()))


@each
def test_half_precision_images_are_sampled_at_the_right_place(degrade):
    images = torch.rand(3, 3, 121, 130).bfloat16()
    assert_close(degrade(images, seeded()).float(), degrade(images.float(), seeded()), 0.01)


@pytest.mark.gpu
@each
def test_a_gpu_gives_the_same_and_never_waits(degrade):
    images = torch.rand(4, 3, 21, 30)
    on_gpu = images.cuda()
    degrade(on_gpu, seeded())  # the first call loads libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        degraded = degrade(on_gpu, seeded())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(degraded.cpu(), degrade(images, seeded()), 1e-2)  # convolutions there may use TF32


@each
def test_draws_follow_the_generator(degrade):
    images = torch.rand(1, 3, 21, 30).expand(8, -1, -1, -1)
    one, two, other = (degrade(images, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, two)
    if degrade is not ALL["zoom_in fixed"]:
        assert not torch.equal(one, other)
        assert not all(torch.equal(one[0], image) for image in one)  # each image has its own draw
