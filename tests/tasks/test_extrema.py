"""ExtreMA: several extreme masks of one image, one pass of the teacher, and image representations."""

import pytest
import torch
from perturbing import perturbed
from small import plain_tokens, seeded, small

from patchloom.tasks.extrema import ExtreMA
from patchloom.withhold.encoder_input import EncoderInput, all_patches

KINDS = ["cait", "vit", "mean"]


def make(encoder=None, **options):
    encoder = {"class_token": options.get("class_token") == "vit"} | (encoder or {})
    task = small(ExtreMA, encoder=encoder, **{"head_width": 48, "head_out": 24} | options)
    perturbed(task.agreement.teacher)  # the teacher differs from the student
    return task.eval()


def views(b=4):
    return torch.randn(2, b, 3, 32, 32, generator=seeded(1))


def guesses(task, given):
    """Return the student's predictions [v b out] of the teacher's output, one for each of the v masks."""
    made = task.agreement.predict(task.agreement.represent(task.encoder, given))
    return made.unflatten(0, (-1, len(given.images)))


def parts_of(given):
    masks = len(given.visible) // len(given.images)
    return [EncoderInput(given.images, part) for part in given.visible.chunk(masks)]


def test_auto_is_up_to_five_masks_and_a_class_token_if_it_is_the_representation():
    for ratio, sizes in {0.8: (12,) * 5, 0.9: (6,) * 5, 0.75: (16,) * 4, 0.6: (25,) * 2}.items():
        assert make(mask_ratio=ratio).sizes == sizes
    for kind in KINDS:
        assert ExtreMA.encoder_defaults({"class_token": kind})["class_token"][0] == (kind == "vit")
    augment = make(crop="own", color="shared").augment
    assert (augment.crop, augment.color, augment.size) == ("own", "shared", (32, 32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["byol", "infonce"])
def test_masks_in_one_batch_are_masks_one_by_one_and_the_teacher_runs_once(kind, loss):
    task, (student, teacher), sizes = make(class_token=kind, masks=4, loss=loss), views(), []
    given = task.given(student, seeded())
    together = guesses(task, given)
    alone = torch.cat([guesses(task, part) for part in parts_of(given)])
    assert len(together) == 4
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    losses = [task(student, teacher, given=part).loss for part in parts_of(given)]
    for module in (task.agreement.teacher.projection, task.agreement.projection):
        module.register_forward_hook(lambda _, given, out: sizes.append((len(out), out.requires_grad)))
    torch.testing.assert_close(task(student, teacher, given=given).loss, torch.stack(losses).mean())
    assert sizes == [(4, False), (16, True)]


def plain_representation(kind, vit, images, visible=None):
    """Compute the image representation with timm's parts on the visible patches."""
    tokens = vit.norm(plain_tokens(vit, vit.patch_embed(images), visible))
    return tokens[:, 0] if kind == "vit" else tokens[:, vit.num_prefix_tokens :].mean(1)


@pytest.mark.parametrize("kind", ["vit", "mean"])  # that of class attention is in the golden vectors
def test_one_mask_is_byol_by_hand(kind):
    task, (student, teacher) = make(class_token=kind, masks=1), views()
    given, asked = task.given(student, seeded()), task.agreement
    q = asked.prediction(asked.projection(plain_representation(kind, task.encoder, student, given.visible)))
    k = asked.teacher.projection(plain_representation(kind, asked.teacher.encoder, teacher))
    distance = (q / q.norm(dim=1, keepdim=True) - k / k.norm(dim=1, keepdim=True)).square().sum(1).mean()
    torch.testing.assert_close(task(student, teacher, given=given).loss, distance, rtol=1e-4, atol=1e-5)


def test_only_cait_has_class_attention_and_reads_patches_only():
    for kind in ("mean", "vit"):
        task = make(class_token=kind)
        assert task.agreement.instance_head is None and task.extra_modules().keys() == {"projection"}
        assert not any("instance_head" in name for name in task.state_dict())
    task, entered = make(encoder={"class_token": True, "reg_tokens": 2}, attention_blocks=3), []
    asked = task.agreement
    head = task.extra_modules()["instance_head"]
    assert head is asked.instance_head and len(head.layers) == len(asked.teacher.instance_head.layers) == 3
    assert head.sizes["depth"] == 3 and len(make().agreement.instance_head.layers) == 2
    asked.instance_head.register_forward_pre_hook(lambda module, tokens: entered.append(tokens[0].shape))
    assert asked.represent(task.encoder, all_patches(views()[0], 64)).shape == (4, 32)
    assert entered == [(4, 64, 32)]
