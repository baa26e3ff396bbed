"""Native kernels give torch's results, forward and backward."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from sweep import build, views_of
from timm.models.vision_transformer import Block
from torch.nn import functional as F

from patchloom.nets import native
from patchloom.nets import sparse_attention as partial_blocks
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import with_variant
from patchloom.nets.native import ops
from patchloom.nets.performance import checkpoint_gradients, compile_blocks, fuse_attention, use_kernels
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


def reference(q, k, v):
    """Compute attention over [b n h d] in float64."""
    q, k, v = (part.double().transpose(1, 2) for part in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


@here
@pytest.mark.parametrize(
    "b, n, h, side", [(2, 197, 3, 64), (3, 50, 2, 32), (2, 16, 4, 16), (1, 7, 1, 48), (2, 1, 2, 80)]
)
def test_attention_of_the_same_tokens(b, n, h, side):
    torch.manual_seed(0)
    packed, grad = halves(b, n, 3, h, side), halves(b, n, h, side)
    one, two = packed.clone().requires_grad_(), packed.double().requires_grad_()
    found, true = native.attention(one), reference(*two.unbind(2))
    found.backward(grad)
    true.backward(grad.double())
    assert distance(found, true) < ROUNDED and distance(one.grad, two.grad) < ROUNDED
    with torch.no_grad():
        assert torch.equal(native.attention(packed), found)


@here
def test_attention_with_relative_positions_stays_on_torchs_kernels():
    torch.manual_seed(0)
    options = {"embed_dim": 64, "depth": 1, "num_heads": 2}
    spec = EncoderSpec("vit_tiny_patch16_224", (16, 16), 4, options=options)
    vit = with_variant(build_encoder(spec), EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "a"), "relative")
    table = vit.blocks[0].attn.rel_pos.relative_position_bias_table
    torch.nn.init.normal_(table)
    use_kernels(vit, "native")
    tokens = torch.randn(2, 17, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found, true = run_blocks(vit.blocks, tokens), vit.blocks[0](tokens)
    assert torch.equal(found, true)
    found.sum().backward()
    assert table.grad.abs().max() > 0


@here
@pytest.mark.parametrize("n, m", [(196, 49), (5, 33), (40, 17), (1, 300)])
def test_attention_to_other_tokens_with_any_strides(n, m):
    torch.manual_seed(0)
    q, kv, grad = halves(2, n, 5, 32), halves(2, m, 2, 5, 32), halves(2, n, 5, 32)
    wide = torch.cat([q, q], 3)[..., :32]  # rows with a gap between them
    ones = [wide.detach().requires_grad_(), kv.clone().requires_grad_()]
    twos = [q.double().requires_grad_(), kv.double().requires_grad_()]
    found, true = native.attention(*ones), reference(twos[0], *twos[1].unbind(2))
    found.backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
    true.backward(grad.double())
    assert distance(found, true) < ROUNDED
    for one, two in zip(ones, twos, strict=True):
        assert distance(one.grad, two.grad) < ROUNDED


@here
def test_attention_of_huge_scores_is_finite_and_exact():
    q = torch.zeros(1, 3, 3, 1, 16, dtype=torch.bfloat16)
    q[0, :, 0], q[0, 1, 1] = 300, 300  # every token attends to the second one
    q[0, :, 2, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    assert native.attention(q)[0, :, 0, 0].tolist() == [2, 2, 2]


@here
@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_stays_nan(part):
    # a diverging run is noticed by its loss
    packed = halves(1, 20, 3, 1, 16)
    packed[0, 3, part] = float("nan")
    spoilt = native.attention(packed).isnan().flatten(2).any(2)[0]
    assert spoilt.tolist() == [part > 0 or i == 3 for i in range(20)]
    x = torch.full((1, 16), float("nan"), dtype=torch.bfloat16, requires_grad=True)
    answer = native.gelu(x, torch.zeros(16))
    answer.sum().backward()
    assert answer.isnan().all() and x.grad.isnan().all()
    layer, x = torch.nn.LayerNorm(16), torch.randn(2, 16)
    x[1, 5] = float("nan")
    assert native.add_norm(x, None, None, layer)[1].isnan().all(1).tolist() == [False, True]


@here
def test_unreadable_inputs_are_rejected():
    for wrong in (torch.randn(2, 9, 3, 2, 16), halves(2, 9, 3, 2, 8)):
        with pytest.raises(ValueError, match="the kernel needs torch.bfloat16 of a width divisible by 16, not"):
            native.attention(wrong)
    for wrong in (halves(2, 9, 3, 16, 32).transpose(3, 4)[..., :16], halves(2, 9, 3, 2, 17)[..., :16]):
        with pytest.raises(ValueError, match="contiguous"):
            native.attention(wrong)
    with pytest.raises(ValueError, match="the kernel needs torch.float32"):
        native.gelu(halves(2, 16), halves(16))
    with pytest.raises(ValueError, match="the kernel needs torch.float32"):
        native.add_norm(torch.randn(2, 16).double(), None, None, torch.nn.LayerNorm(16))


@here
def test_gelu_of_every_bfloat16_number():
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e30)]
    x = x[: len(x) // 16 * 16].view(-1, 16)
    bias = torch.zeros(16, requires_grad=True)
    one, two = x.clone().requires_grad_(), x.double().requires_grad_()
    found, true = native.gelu(one, bias), F.gelu(two)
    found.sum().backward()
    true.sum().backward()
    assert ((found.double() - true).abs() <= 2e-6 + true.abs() / 256).all()
    # beyond 5 the slope is set to 0 or 1: there it is 7.1e-6 off
    assert ((one.grad.double() - two.grad).abs() <= 8e-6 + two.grad.abs() / 256).all()
    torch.testing.assert_close(bias.grad.double(), two.grad.sum(0), rtol=1e-4, atol=1e-2)


@here
def test_gelu_adds_a_bias_before_it_rounds():
    torch.manual_seed(0)
    x, bias, grad = halves(37, 5, 48), torch.randn(48), halves(37, 5, 48)
    one = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    two = [x.double().requires_grad_(), bias.double().requires_grad_()]
    found, true = native.gelu(*one), F.gelu(sum(two))
    found.backward(grad)
    true.backward(grad.double())
    assert distance(found, true) < ROUNDED
    for left, right in zip(one, two, strict=True):
        assert distance(left.grad, right.grad) < ROUNDED


@here
@pytest.mark.parametrize("adding", [True, False])
@pytest.mark.parametrize("asked", ["both", "sum", "norm"])
def test_norm_of_a_sum(adding, asked):
    torch.manual_seed(0)
    layer = torch.nn.LayerNorm(48, eps=1e-6)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x, more, shift = torch.randn(3, 21, 48) * 3 + 5, halves(3, 21, 48), torch.randn(48)
    given = [x, more, shift] if adding else [x]
    ones = [part.clone().requires_grad_() for part in given]
    twos = [part.double().requires_grad_() for part in given]
    added, normed = native.add_norm(*(ones if adding else (ones[0], None, None)), layer)
    true = sum(twos)
    outs, trues = (added, normed), (true, deepcopy(layer).double()(true))
    picked = {"both": (0, 1), "sum": (0,), "norm": (1,)}[asked]
    weights = {i: halves(3, 21, 48) for i in picked}
    torch.autograd.backward([outs[i] for i in picked], [weights[i].to(outs[i].dtype) for i in picked])
    found = [part.grad for part in ones]
    torch.autograd.backward([trues[i] for i in picked], [weights[i].double() for i in picked])
    assert distance(added, true) < 1e-6 and distance(normed, trues[1]) < ROUNDED
    for one, two in zip(found, twos, strict=True):
        assert distance(one, two.grad) < ROUNDED


@here
def test_the_norms_weights_get_their_gradients():
    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(32) for _ in range(2)]
    x, grad = torch.randn(2, 50, 32), halves(2, 50, 32)
    native.add_norm(x, None, None, layers[0])[1].backward(grad)
    layers[1](x).backward(grad.float())
    for one, two in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4)


@here
def test_the_operators_pass_torchs_opcheck():
    x = halves(2, 9, 3, 2, 16).requires_grad_()
    torch.library.opcheck(ops._attention, (x, None, True), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        ops._attention, (x[:, :, 0], x[:, :, 1:], True), test_utils=("test_schema", "test_faketensor")
    )
    bias = torch.randn(16, requires_grad=True)
    torch.library.opcheck(ops._gelu, (halves(3, 16).requires_grad_(), bias))
    torch.library.opcheck(
        ops._norm,
        (torch.randn(3, 16, requires_grad=True), halves(3, 16), torch.randn(16), bias, bias, 1e-6),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


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
    checkpoint_gradients(task, False)
    again, slopes = compiled_gradients_of(task, views, compiler=name == "mae")
    assert again == pytest.approx(loss, rel=1e-3) and distance(slopes, ours) < distance(usual, ours) / 2


def compiled_gradients_of(task, views, compiler):
    """Compute gradients with torch.compile's graphs run uncompiled; or compiled, for blocks with fewer queries."""
    partial_blocks._compiled.cache_clear()  # of this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
        compile_blocks(task)
        if compiler:  # takes half a minute
            patch.undo()
        found = gradients_of(task, views)
    partial_blocks._compiled.cache_clear()
    return found


@here
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True},
        {"init_values": 0.1},
        {"drop_path": 0.1},
        {"attn_drop": 0.1},
        {"proj_drop": 0.1},
        {"num_heads": 4},  # of 8
    ],
    ids=str,
)
def test_unsupported_blocks_stay_on_torchs_kernels(options):
    torch.manual_seed(0)
    block, tokens = Block(**{"dim": 32, "num_heads": 2, "qkv_bias": True, **options}).eval(), torch.randn(2, 9, 32)
    fuse_attention(block, False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        usual = run_blocks([block], tokens)
        use_kernels(block, "native")
        assert torch.equal(run_blocks([block], tokens), usual) == bool(options)
        use_kernels(block, "torch")
        assert torch.equal(run_blocks([block], tokens), usual)


@here
def test_float32_runs_on_torchs_kernels():
    torch.manual_seed(0)
    block, tokens = Block(32, 2, qkv_bias=True), torch.randn(2, 9, 32)
    usual = block(tokens)
    use_kernels(block, "native")
    assert torch.equal(run_blocks([block], tokens), usual)
