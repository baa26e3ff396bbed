"""Native kernels give torch's results, forward and backward."""

import pytest
import torch
from sweep import build, views_of
from timm.models.vision_transformer import Block
from torch.nn import functional as F
from traced import traced_parts

from patchloom.nets import native
from patchloom.nets import sparse_attention as partial_blocks
from patchloom.nets.finetune import RelativeAttention
from patchloom.nets.native import ops
from patchloom.nets.performance import checkpoint_gradients, fuse_attention, use_kernels
from patchloom.nets.sparse_attention import run_blocks
from patchloom.tasks import TASKS

here = pytest.mark.skipif(native.lacking() is not None, reason=f"no native kernels: {native.lacking()}")

# bfloat16 rounds to 2^-9 of a number, 1.1e-3 on average; each value is rounded a few times
ROUNDED = 5e-3


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    """Run torch on two threads, which the kernels use, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def distance(found, true):
    """Return the relative distance of two tensors."""
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def halves(*shape):
    return torch.randn(shape).bfloat16()


@here
@pytest.mark.parametrize("part", ["tokens", "weights"])
def test_nan_stays_nan(part):
    # a diverging run is noticed by its loss
    block, tokens = one_block(), torch.randn(2, 9, 32)
    with torch.no_grad():
        (tokens[1, 5] if part == "tokens" else block.attn.qkv.weight[:, 5])[3] = float("nan")
    tokens.requires_grad_()
    answer = block.kernels.compute(block, tokens)
    assert answer.isnan().flatten(1).any(1).tolist() == [part == "weights", True]
    answer[1].sum().backward()
    assert tokens.grad[1].isnan().all() and block.mlp.fc1.weight.grad.isnan().all()


@here
def test_unreadable_inputs_are_rejected():
    block = one_block()
    for wrong in (halves(2, 9, 32), torch.randn(2, 9, 40)):
        with pytest.raises(ValueError, match="float32 of a width divisible by 16"):
            block.kernels.compute(block, wrong)


@here
def test_attention_of_huge_scores_is_finite_and_exact():
    block, tokens = one_block(16, 1), torch.zeros(1, 3, 16)
    tokens[0, 1, 1] = 1  # every token attends to the second one
    for weight in block.parameters():
        torch.nn.init.zeros_(weight)
    with torch.no_grad():
        block.norm1.weight.fill_(1)
        block.attn.qkv.bias[:16] = 300
        block.attn.qkv.weight[16:32] = 300 * torch.eye(16)[1]
        block.attn.qkv.weight[32:], block.attn.proj.weight[:] = torch.eye(16), torch.eye(16)
        normed = block.norm1(tokens)
        found = block.kernels.compute(block, tokens) - tokens
    assert distance(found, normed[:, 1:2].expand(-1, 3, -1)) < ROUNDED


def one_block(width=32, heads=2, **options):
    """Return a block on native kernels, with random weights."""
    torch.manual_seed(0)
    block = Block(width, heads, **{"qkv_bias": True, **options})
    fuse_attention(block, False)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.1 if weight.ndim > 1 else 0.5)
    use_kernels(block, "native")
    assert block.kernels is not None
    return block


@here
def test_gelu_and_its_slope_of_every_bfloat16_number():
    # one token whose MLP sees its biases only: the gradients of fc2 are GELU, those of the biases of fc1 its slope
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e30)].float()
    x = x[: len(x) // 16 * 16]
    block = one_block(16, 1, mlp_ratio=len(x) / 16)
    with torch.no_grad():
        block.mlp.fc1.weight.zero_()
        block.mlp.fc1.bias.copy_(x)
        block.mlp.fc2.weight.copy_(torch.eye(16, len(x))[:1].fill_(1) * torch.eye(16)[:, :1])  # only of one channel
    block.kernels.compute(block, torch.randn(1, 1, 16)).sum().backward()
    two = x.double().requires_grad_()
    true = F.gelu(two)
    true.sum().backward()
    found, slope = block.mlp.fc2.weight.grad[3].double(), block.mlp.fc1.bias.grad.double()
    assert ((found - true).abs() <= 2e-6 + true.abs() / 256).all()
    assert ((slope - two.grad).abs() <= 8e-6 + two.grad.abs() / 256).all()


WIDTHS = ((32, 2, {}), (80, 5, {"qkv_bias": False}), (192, 3, {}))
# width, heads, options; tokens (3 times 41 rows are not a multiple of what a thread takes), keys, first query
CASES = [(*width, 41, keys, first) for width in WIDTHS for keys in (None, 15) for first in (0, 3)]
CASES += [(48, 1, {}, 1, None, 0), (64, 4, {}, 16, None, 0), (64, 2, {}, 33, 17, 28), (32, 1, {}, 300, None, 299)]


@here
@pytest.mark.parametrize(("width", "heads", "options", "t", "m", "first"), CASES)
def test_a_block_is_closer_to_float32_than_torchs_bfloat16(width, heads, options, t, m, first):
    block = one_block(width, heads, **options)
    tokens = torch.randn(3, t, width) * 2 + 1
    keys_values = None if m is None else torch.stack([torch.randperm(t)[:m] for _ in tokens], 1).T
    grad = torch.randn(3, t - first, width)

    def run(step, half=True):
        block.zero_grad()
        one = tokens.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            answer = step(one)
        answer.backward(grad)
        return [answer, one.grad, *(weight.grad for weight in block.parameters())]

    def usual(x):
        return partial_blocks.context_block(
            block, x, torch.arange(t).expand(3, -1) if keys_values is None else keys_values
        )[:, first:]

    def native_step(x):
        return block.kernels.compute(block, x, keys_values=keys_values, first=first)

    exact, halved, ours, again = run(usual, half=False), run(usual), run(native_step), run(native_step)
    for true, usual_one, one, same in zip(exact, halved, ours, again, strict=True):
        assert distance(one, true) < 1.3 * distance(usual_one, true) + 1e-6
        assert torch.equal(one, same)
    every, usual_ones, trues = (torch.cat([one.flatten() for one in found]) for found in (ours, halved, exact))
    assert distance(every, trues) < distance(usual_ones, trues)
    with torch.no_grad():
        assert torch.equal(native_step(tokens), ours[0])


@here
def test_frozen_weights_get_no_gradient():
    block, tokens = one_block(), torch.randn(2, 9, 32)
    block.kernels.compute(block, tokens).sum().backward()
    all_of_them = {name: weight.grad for name, weight in block.named_parameters()}
    block.zero_grad()
    for name, weight in block.named_parameters():
        weight.requires_grad = name in ("attn.qkv.weight", "mlp.fc1.bias")
    block.kernels.compute(block, tokens).sum().backward()
    for name, weight in block.named_parameters():
        assert torch.equal(weight.grad, all_of_them[name]) if weight.requires_grad else weight.grad is None


@here
@pytest.mark.parametrize("images, keys, first", [(0, None, 0), (0, 3, 1), (2, 0, 0), (2, None, 9)])
def test_tables_without_rows_give_gradients_of_zero(images, keys, first):
    block, tokens = one_block(), torch.randn(images, 9, 32)
    keys_values = torch.arange(9 if keys is None else keys).expand(images, -1)

    def usual(x):
        return partial_blocks.context_block(block, x, keys_values)[:, first:]

    def native_step(x):
        return block.kernels.compute(block, x, keys_values=None if keys is None else keys_values, first=first)

    def slopes(step):
        block.zero_grad()
        one = tokens.clone().requires_grad_()
        step(one).sum().backward()
        return [one.grad, *(weight.grad for weight in block.parameters())]

    torch.full((100_000,), float("nan"))  # what a gradient that is never written would probably show
    for one, true in zip(slopes(native_step), slopes(usual), strict=True):
        assert distance(one, true) < 0.05 if true.any() else not one.any()


@here
def test_second_derivatives_are_refused():
    block, tokens = one_block(), torch.randn(2, 9, 32, requires_grad=True)
    (slope,) = torch.autograd.grad(block.kernels.compute(block, tokens).square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@here
def test_a_step_may_need_more_than_four_gibibytes():
    sizes = {"images": 4096, "tokens": 197, "queries": 197, "keys": 197, "heads": 12, "side": 64, "width": 768}
    space = ops._space_for(ops._Block(**sizes, hidden=3072))
    assert space == 4096 * 197 * (3072 + 8 * 768)


class Doubled(torch.nn.Linear):
    """A linear layer that computes more than its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


def relative(block):
    block.attn.__class__ = RelativeAttention


FOREIGN_PARTS = {
    "MLP": ({}, lambda block: setattr(block.mlp, "fc1", Doubled(32, 128))),
    "attention": ({}, lambda block: setattr(block.attn, "qkv", Doubled(32, 96))),
    "gate": ({}, lambda block: setattr(block.attn, "gate", torch.nn.Linear(32, 32))),
    "hook": ({}, lambda block: block.mlp.fc2.register_forward_hook(lambda layer, given, out: 2 * out)),
    "hook before": ({}, lambda block: block.norm1.register_forward_pre_hook(lambda layer, given: None)),
    "relative positions": ({}, relative),
    "tanh": ({}, lambda block: setattr(block.mlp, "act", torch.nn.GELU("tanh"))),
    "no bias": ({}, lambda block: setattr(block.attn.proj, "bias", None)),
    "norms of queries": ({"qk_norm": True}, None),
    "LayerScale": ({"init_values": 0.1}, None),
    "drop path": ({"drop_path": 0.1}, None),
    "attention dropout": ({"attn_drop": 0.1}, None),
    "dropout": ({"proj_drop": 0.1}, None),
    "heads of 8": ({"num_heads": 4}, None),
    "an MLP of width 40": ({"mlp_ratio": 1.25}, None),
}


@here
@pytest.mark.parametrize("options, change", FOREIGN_PARTS.values(), ids=FOREIGN_PARTS)
def test_blocks_with_other_parts_stay_on_torchs_kernels(options, change):
    block = Block(**{"dim": 32, "num_heads": 2, "qkv_bias": True} | options)
    if change:
        change(block)
    use_kernels(block, "native")
    assert block.kernels is None


@here
def test_plain_blocks_run_on_native_kernels_in_bfloat16_until_torchs_are_chosen():
    block, tokens = one_block(), torch.randn(2, 9, 32)
    with torch.no_grad():
        assert torch.equal(run_blocks([block], tokens), block(tokens))  # in float32
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(run_blocks([block], tokens), block(tokens))
        with torch.autocast("cpu", torch.bfloat16):
            usual = block(tokens)
            assert not torch.equal(run_blocks([block], tokens), usual)
            use_kernels(block, "torch")
            assert torch.equal(run_blocks([block], tokens), usual)


@here
def test_the_operator_of_compiled_steps_has_the_gradients_of_the_kernels():
    block, tokens, keys = one_block(), torch.randn(2, 9, 32, requires_grad=True), torch.tensor([[2, 0, 7]] * 2)
    layers = block.norm1, block.attn.qkv, block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    compiled = ops._operator(tokens, keys, 2, [block.norm1.eps, block.norm2.eps], 2, True, *weights)[0]
    usual = block.kernels.compute(block, tokens, keys_values=keys, first=2)
    slopes = [torch.autograd.grad(one.square().sum(), [tokens, *weights]) for one in (compiled, usual)]
    assert all(torch.equal(one, other) for one, other in zip(*slopes, strict=True))


def gradients_of(task, views, half=True):
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = task(*views, progress=0.5, generator=torch.Generator().manual_seed(3)).loss
    loss.backward()
    found = torch.cat([weight.grad.flatten() for weight in task.parameters() if weight.grad is not None])
    task.zero_grad()
    return loss.item(), found


@here
@pytest.mark.parametrize("name", [name for name in TASKS if name != "nepa"])  # the kernels have no causal mask
def test_every_task_gets_torchs_gradients(name):
    task = build(name).train()
    fuse_attention(task, False)
    views = views_of(task)
    exact, slope = gradients_of(task, views, half=False)
    _, usual = gradients_of(task, views)
    use_kernels(task, "native")
    loss, ours = gradients_of(task, views)
    assert loss == pytest.approx(exact, rel=5e-3)
    assert not torch.equal(ours, usual)  # the native kernels computed it
    assert distance(ours, slope) < 1.5 * distance(usual, slope) + 1e-3
    checkpoint_gradients(task, True)
    again, slopes = gradients_of(task, views)
    assert again == loss and torch.equal(slopes, ours)


@here
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("mae", "aot_eager"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("mp3", "aot_eager"), ("mae", "inductor"))),
    ],
)
def test_compiled_steps_get_the_gradients_of_the_kernels(name, backend):
    task = build(name).train()
    fuse_attention(task, False)
    views = views_of(task)
    _, usual = gradients_of(task, views)
    use_kernels(task, "native")
    loss, ours = gradients_of(task, views)
    with traced_parts(backend):
        again, slopes = gradients_of(task, views)
    assert again == pytest.approx(loss, rel=1e-3) and distance(slopes, ours) < distance(usual, ours) / 2
