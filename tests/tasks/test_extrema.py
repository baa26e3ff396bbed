"""ExtreMA: several extreme masks of one image, one pass of the teacher, and image representations."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.questions.agreement import byol_loss
from patchloom.tasks.extrema import ExtreMA
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
KINDS = ["cait", "vit", "mean"]


def make(size=(32, 32), p=4, encoder=None, **options):
    torch.manual_seed(0)
    options = {"head_width": 48, "head_out": 24} | options
    own = {"class_token": options.get("class_token") == "vit"} | (encoder or {})
    task = ExtreMA(build_encoder(EncoderSpec("nano", size, p, options=SIZES | own)), **options)
    with torch.no_grad():  # the teacher differs from the student, and no bias is zero
        for name, weight in task.named_parameters():
            if "pos_embed" not in name:
                weight.add_(torch.randn_like(weight) * 0.05)
    return task.eval()


def views(b=4):
    return torch.randn(2, b, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def drawn(task, images, seed=0):
    return task.given(images, torch.Generator().manual_seed(seed))


def guesses(task, given):
    """Return the student's predictions [v b out] of the teacher's output, one for each of the v masks."""
    made = task.agreement.predict(task.agreement.represent(task.encoder, given))
    return made.unflatten(0, (-1, len(given.images)))


def parts_of(given):
    """Return the encoder's input for each mask separately."""
    masks = len(given.visible) // len(given.images)
    return [EncoderInput(given.images, part) for part in given.visible.chunk(masks)]


@pytest.mark.parametrize("masks", [1, 2, 5, 10])  # 10 is Table 3's best row on IN-22k
def test_masks_are_disjoint(masks):
    task = make(mask_ratio=0.9, masks=masks)
    given = drawn(task, torch.randn(20, 3, 32, 32))
    assert given.visible.shape == (20 * masks, 6) and len(given.images) == 20
    for row in torch.cat([part.visible for part in parts_of(given)], dim=1).tolist():
        assert len(set(row)) == 6 * masks


@pytest.mark.parametrize(("ratio", "visible", "masks"), [(0.8, 12, 5), (0.9, 6, 5), (0.75, 16, 4), (0.6, 25, 2)])
def test_auto_is_up_to_five_masks(ratio, visible, masks):
    assert make(mask_ratio=ratio).sizes == (visible,) * masks


@pytest.mark.parametrize("blocks", [1, 2, 3])  # the paper's Table 5
def test_blocks_of_class_attention(blocks):
    task = make() if blocks == 2 else make(attention_blocks=blocks)
    head = task.extra_modules()["instance_head"]
    assert len(head.layers) == len(task.agreement.teacher.instance_head.layers) == blocks
    assert head.sizes["depth"] == blocks


class Looks:
    """Recorder of the images that a module receives, and of whether gradients are enabled."""

    def __init__(self, module):
        self.sizes, self.gradients = [], []
        module.register_forward_hook(self)

    def __call__(self, module, given, out):
        self.sizes.append(len(out))
        self.gradients.append(out.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", [1, 5])
def test_the_teacher_runs_once_for_any_number_of_masks(kind, masks):
    task = make(class_token=kind, masks=masks, mask_ratio=0.85)
    its = task.agreement.teacher
    teacher = Looks(its.projection), Looks(its.encoder.blocks[0])
    student = Looks(task.agreement.projection), Looks(task.encoder.blocks[0])
    task(*views(), generator=torch.Generator().manual_seed(0)).loss.backward()
    for looks in teacher:
        assert looks.sizes == [4] and looks.gradients == [False]
    for looks in student:  # all masks in one batch
        assert looks.sizes == [4 * masks] and looks.gradients == [True]
    assert all(weight.grad is None and not weight.requires_grad for weight in its.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_masks_in_one_batch_are_masks_one_by_one(kind):
    task, (student, teacher) = make(class_token=kind, masks=4), views()
    given = drawn(task, student)
    together = guesses(task, given)
    alone = torch.cat([guesses(task, part) for part in parts_of(given)])
    assert len(together) == 4
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    losses = [task(student, teacher, given=part).loss for part in parts_of(given)]
    torch.testing.assert_close(task(student, teacher, given=given).loss, torch.stack(losses).mean())


def plain_representation(task, vit, head, images, visible):
    """Compute the image representation with timm's parts on the visible patches."""
    x = vit.patch_embed(images) + vit.pos_embed[:, vit.num_prefix_tokens :]
    x = x.gather(1, visible[..., None].expand(-1, -1, x.shape[-1]))
    if vit.cls_token is not None:
        x = torch.cat([(vit.cls_token + vit.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)
    x = vit.blocks(x)
    if task.agreement.representation == "vit":
        return vit.norm(x)[:, 0]
    if task.agreement.representation == "mean":
        return vit.norm(x)[:, vit.num_prefix_tokens :].mean(1)
    token = head.token.expand(len(x), -1, -1)
    for layer in head.layers:  # only the class token is a query; the patch tokens do not change
        u = layer.norm1(torch.cat([token, x], dim=1))
        attn, heads = layer.attn, layer.attn.num_heads
        q, k, v = (part(u).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (attn.q, attn.k, attn.v))
        weights = (q[:, :, :1] @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        token = token + layer.gamma_1 * attn.proj((weights @ v).transpose(1, 2).flatten(2))
        token = token + layer.gamma_2 * layer.mlp(layer.norm2(token))
    return vit.norm(token)[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_mask_is_byol_by_hand(kind):
    task, (student, teacher) = make(class_token=kind, masks=1), views()
    given, asked = drawn(task, student), task.agreement
    represented = plain_representation(task, task.encoder, asked.instance_head, student, given.visible)
    q = asked.prediction(asked.projection(represented))
    everything = torch.arange(64).expand(4, -1)
    its = asked.teacher
    head = its.instance_head if kind == "cait" else None
    k = its.projection(plain_representation(task, its.encoder, head, teacher, everything))
    distance = (q / q.norm(dim=1, keepdim=True) - k / k.norm(dim=1, keepdim=True)).square().sum(1).mean()
    torch.testing.assert_close(task(student, teacher, given=given).loss, distance, rtol=1e-4, atol=1e-5)


def test_only_cait_has_class_attention_and_reads_patches_only():
    for kind in ("mean", "vit"):
        task = make(class_token=kind)
        assert task.agreement.instance_head is None and task.extra_modules().keys() == {"projection"}
        assert not any("instance_head" in name for name in task.state_dict())
    task, entered = make(encoder={"class_token": True, "reg_tokens": 2}), []
    asked = task.agreement
    assert task.extra_modules()["instance_head"] is asked.instance_head
    asked.instance_head.register_forward_pre_hook(lambda module, tokens: entered.append(tokens[0].shape))
    assert asked.represent(task.encoder, all_patches(views()[0], 64)).shape == (4, 32)
    assert entered == [(4, 64, 32)]


def test_infonce_against_a_loop():
    task, (student, teacher) = make(loss="infonce", temperature=0.5, masks=3), views()
    given = drawn(task, student)
    queries = F.normalize(guesses(task, given), dim=-1).detach()
    keys = F.normalize(task.agreement.target(task.encoder, teacher), dim=-1).detach()
    losses = []
    for v in range(3):
        for i in range(4):
            scores = [math.exp(float(queries[v, i] @ keys[j]) / 0.5) for j in range(4)]
            losses.append(-2 * 0.5 * math.log(scores[i] / sum(scores)))
    assert task(student, teacher, given=given).loss.item() == pytest.approx(sum(losses) / 12, rel=1e-4)


def test_the_two_views_are_not_mixed_up():
    task, (student, teacher) = make(), views()
    given = drawn(task, student)
    there = task(student, teacher, given=given).loss
    back = task(teacher, student, given=replace(given, images=teacher)).loss
    assert not torch.allclose(there, back)
    torch.testing.assert_close(there, byol_loss(guesses(task, given), task.agreement.target(task.encoder, teacher)))


def test_masked_patches_do_not_reach_the_student():
    task, (student, _) = make(masks=1), views()
    visible = drawn(task, student).visible
    poisoned = torch.full_like(student, float("nan"))
    for i in range(4):
        for place in visible[i].tolist():
            rows, columns = slice(place // 8 * 4, place // 8 * 4 + 4), slice(place % 8 * 4, place % 8 * 4 + 4)
            poisoned[i, :, rows, columns] = student[i, :, rows, columns]
    one, other = (mask_patches(all_patches(images, 64), visible) for images in (student, poisoned))
    represent = task.agreement.represent
    torch.testing.assert_close(represent(task.encoder, other), represent(task.encoder, one))


@pytest.mark.parametrize(("progress", "kept"), [(0.0, 0.9), (0.5, 0.95), (1.0, 1.0)])
def test_the_teachers_momentum_rises(progress, kept):
    task = make(momentum=0.9)
    teacher = task.agreement.teacher
    old = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    task.after_step(progress)
    assert {name.partition(".")[0] for name in old} == {"encoder", "instance_head", "projection"}
    for name, new in teacher.state_dict().items():
        home, _, rest = name.partition(".")
        source = getattr(task if home == "encoder" else task.agreement, home).state_dict()[rest]
        torch.testing.assert_close(new, kept * old[name] + (1 - kept) * source)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"masks": 0}, "no 0 disjoint masks of 12 visible patches each in 64: give --task.masks 1 to 5"),
        ({"masks": 6}, "6 disjoint masks of 12 visible patches"),
        ({"attention_blocks": 0}, "--task.attention_blocks must be 1 or more, not 0"),
        ({"attention_blocks": 3, "class_token": "mean"}, "has no effect here, because only --task.class_token cait"),
        ({"masks": 22, "mask_ratio": 0.95}, "give --task.masks 1 to 21"),
        ({"loss": "infonce", "temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": 0.2}, "temperature has no effect here, because byol has no temperature"),
        ({"momentum": -0.1}, "momentum must lie in"),
        ({"class_token": "vit", "encoder": {"class_token": False}}, "class_token vit needs an encoder with one"),
        ({"class_token": "pool"}, "--task.class_token cannot be pool"),
        ({"loss": "moco"}, "--task.loss cannot be moco: it takes byol, infonce, sigreg or visreg"),
        ({"crop": "both"}, "--task.crop cannot be both"),
        ({"color": "yes"}, "--task.color cannot be yes"),
        ({"mask_ratio": 0.999}, "mask ratio of 0.999 leaves 0 of 64 patches visible"),
        ({"head_width": 0}, "heads cannot be 0 wide"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_encoder_defaults():
    assert ExtreMA.encoder_defaults({"class_token": "vit"})["class_token"][0] is True
    for kind in ("cait", "mean"):
        assert ExtreMA.encoder_defaults({"class_token": kind})["class_token"][0] is False
    augment = make(crop="own", color="shared").augment
    assert (augment.crop, augment.color, augment.size) == ("own", "shared", (32, 32))
