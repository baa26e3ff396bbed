"""Our own kernels give what torch gives, there and back, and are refused in a sentence where they cannot be had."""

import importlib
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from sweep import build, views_of
from timm.models.vision_transformer import Block
from torch.nn import functional as F

from patchloom import pretrain
from patchloom.errors import PatchloomError
from patchloom.nets import native
from patchloom.nets.build import EncoderSpec
from patchloom.nets.encode import checkpoint_gradients, compile_blocks, fuse_attention
from patchloom.nets.native import compiler as made
from patchloom.nets.native import ops
from patchloom.nets.native.blocks import use_native
from patchloom.nets.partial import run_blocks
from patchloom.tasks import TASKS
from patchloom.train import pictures, suits

trained = importlib.import_module("patchloom.train.pretrain")  # the package's name for it is a function
here = pytest.mark.skipif(native.lacking() is not None, reason=f"native kernels cannot be had: {native.lacking()}")

# bfloat16 rounds to 2^-9 of a number, which is 1.1e-3 on average over many; each value is rounded a few times
ROUNDED = 5e-3


def apart(found, true):
    """Relative distance of two tensors."""
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def halves(*shape):
    return torch.randn(shape).bfloat16()


def reference(q, k, v):
    """Attention over [b n h d] in float64."""
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
    assert apart(found, true) < ROUNDED and apart(one.grad, two.grad) < ROUNDED
    with torch.no_grad():
        assert torch.equal(native.attention(packed), found)


@here
@pytest.mark.parametrize("n, m", [(196, 49), (5, 33), (40, 17), (1, 300)])
def test_attention_to_other_tokens_wherever_they_lie(n, m):
    torch.manual_seed(0)
    q, kv, grad = halves(2, n, 5, 32), halves(2, m, 2, 5, 32), halves(2, n, 5, 32)
    wide = torch.cat([q, q], 3)[..., :32]  # rows with something between them
    ones = [wide.detach().requires_grad_(), kv.clone().requires_grad_()]
    twos = [q.double().requires_grad_(), kv.double().requires_grad_()]
    found, true = native.attention(*ones), reference(twos[0], *twos[1].unbind(2))
    found.backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
    true.backward(grad.double())
    assert apart(found, true) < ROUNDED
    for one, two in zip(ones, twos, strict=True):
        assert apart(one.grad, two.grad) < ROUNDED


@here
def test_attention_of_huge_scores_is_finite_and_exact():
    q = torch.zeros(1, 3, 3, 1, 16, dtype=torch.bfloat16)
    q[0, :, 0], q[0, 1, 1] = 300, 300  # every token asks for the second one's value
    q[0, :, 2, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    assert native.attention(q)[0, :, 0, 0].tolist() == [2, 2, 2]


@here
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_no_number_stays_none(part):
    # a run that diverges is noticed by its loss
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
def test_what_the_kernels_cannot_read_is_refused():
    for wrong in (torch.randn(2, 9, 3, 2, 16), halves(2, 9, 3, 2, 8)):
        with pytest.raises(ValueError, match="the kernel needs torch.bfloat16 of a width that 16 divides, not"):
            native.attention(wrong)
    for wrong in (halves(2, 9, 3, 16, 32).transpose(3, 4)[..., :16], halves(2, 9, 3, 2, 17)[..., :16]):
        with pytest.raises(ValueError, match="numbers of a head must be neighbours"):
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
    # beyond 5 the slope is taken for 0 or 1: there it is 7.1e-6 off
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
    assert apart(found, true) < ROUNDED
    for left, right in zip(one, two, strict=True):
        assert apart(left.grad, right.grad) < ROUNDED


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
    assert apart(added, true) < 1e-6 and apart(normed, trues[1]) < ROUNDED
    for one, two in zip(found, twos, strict=True):
        assert apart(one, two.grad) < ROUNDED


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
def test_the_operators_keep_torchs_rules():
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
@pytest.mark.parametrize("name", TASKS)
def test_every_task_gets_the_gradients_that_it_gets_from_torch(name):
    task = build(name).train()
    fuse_attention(task, False)
    views = views_of(task)
    exact, slope = gradients_of(task, views, half=False)
    _, usual = gradients_of(task, views)
    use_native(task)
    assert any(module.native for module in task.modules() if isinstance(module, Block))
    loss, ours = gradients_of(task, views)
    assert loss == pytest.approx(exact, rel=5e-3)
    assert not torch.equal(ours, usual)  # it is our kernels that computed it
    assert apart(ours, slope) < 1.5 * apart(usual, slope) + 1e-3
    checkpoint_gradients(task, True)
    again, slopes = gradients_of(task, views)
    assert again == loss and torch.equal(slopes, ours)
    checkpoint_gradients(task, False)
    compile_as_it_is(task)
    again, slopes = gradients_of(task, views)
    assert again == pytest.approx(loss, rel=1e-3) and apart(slopes, ours) < apart(usual, ours) / 2


def compile_as_it_is(task):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
        compile_blocks(task)


def test_blocks_that_the_kernels_do_not_know_stay_on_torchs():
    for options in (
        {"qk_norm": True},
        {"init_values": 0.1},
        {"drop_path": 0.1},
        {"attn_drop": 0.1},
        {"proj_drop": 0.1},
    ):
        block = Block(32, 2, qkv_bias=True, **options)
        use_native(block)
        assert not block.native, options
    block = Block(24, 3, qkv_bias=True)  # heads of 8
    use_native(block)
    assert not block.native


@here
def test_in_float32_torch_computes_what_it_always_did():
    torch.manual_seed(0)
    block, tokens = Block(32, 2, qkv_bias=True), torch.randn(2, 9, 32)
    usual = block(tokens)
    use_native(block)
    assert torch.equal(run_blocks([block], tokens), usual)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda patch: patch.setattr(sys, "platform", "darwin"), "they are for Linux"),
        (lambda patch: patch.setattr(made, "_extensions", frozenset), "the processor has no AVX512-BF16"),
        (lambda patch: patch.setattr(made, "compiler", lambda: None), "g.. was not found"),
    ],
)
def test_why_they_cannot_be_had_is_said(change, reason, monkeypatch):
    monkeypatch.setattr(made, "_extensions", lambda: frozenset(made._EXTENSIONS))
    monkeypatch.setattr(made, "compiler", lambda: ["g++"])
    change(monkeypatch)
    with pytest.raises(PatchloomError, match=f"cannot be had here, since {reason}.*: use --kernels torch"):
        made.library.__wrapped__()


@here
def test_what_the_compiler_says_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(made, "compiler", lambda: ["g++", "-include", "nowhere.h"])
    with pytest.raises(
        PatchloomError, match=r"cannot compile the native kernels \(.*nowhere.h.*\): use --kernels torch"
    ):
        made.library.__wrapped__()
    monkeypatch.setattr(made, "library", made.library.__wrapped__)
    assert "cannot compile the native kernels (" in made.missing() and made.missing().endswith(")")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not list(tmp_path.rglob("*.so*"))
    monkeypatch.setattr(made, "compiler", lambda: ["false"])
    with pytest.raises(PatchloomError, match=r"false cannot compile the native kernels \(exit status 1\)"):
        made.library.__wrapped__()


@here
def test_they_run_on_torchs_own_threads():
    # a second set of threads would fight with torch's for the cores
    code = (
        "import sklearn.utils._openmp_helpers, torch; from patchloom.nets import native; native.library()\n"
        "from patchloom.nets.native.compiler import _openmp\n"
        "lines = open('/proc/self/maps').read().split('\\n')\n"
        "print(*_openmp(), sum('libgomp' in line and 'scikit' not in line and 'r-xp' in line for line in lines))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, found = done.stdout.split()  # scikit-learn brings one of its own
    assert path.startswith(str(Path(torch.__file__).parent)) and found == "1"


def test_they_are_chosen_where_they_are_faster_and_can_be_had(monkeypatch):
    spec = EncoderSpec("nano", (32, 32), 8)
    monkeypatch.setattr(suits.native, "missing", lambda: None)
    monkeypatch.setattr(suits, "fused_gain", lambda *shape: 2.0)
    for gain, form in ((2.05, "torch"), (3.0, "native")):
        monkeypatch.setattr(suits, "attention_gain", lambda *asked, gain=gain: gain)
        assert suits.kernels("cpu", True, spec, 8) == (form, f"native attention is ×{gain / 2:.2f} as fast here")
    assert suits.kernels("cpu", False, spec, 8)[0] == suits.kernels("cuda", True, spec, 8)[0] == "torch"
    for options in ({"num_heads": 16}, {"init_values": 0.1}):
        other = EncoderSpec("nano", (32, 32), 8, options=options)
        assert suits.kernels("cpu", True, other, 8) == ("torch", suits._NOT_SERVED)
        with pytest.raises(PatchloomError, match="--kernels native does not fit this model"):
            suits.check_kernels("native", "cpu", True, other)
    assert "GiB of attention weights" in suits.kernels("cpu", True, EncoderSpec("nano", (512, 512), 4), 4096)[1]
    monkeypatch.setattr(suits.native, "missing", lambda: "g++ was not found")
    assert suits.kernels("cpu", True, spec, 8) == ("torch", "g++ was not found")


def test_asking_for_them_where_they_do_nothing_is_refused(tmp_path):
    with pytest.raises(PatchloomError, match="--kernels native is for bfloat16 on a CPU: add --precision bfloat16"):
        pretrain("shapes:40", "mae", out=tmp_path / "run", kernels="native", precision="float32", epochs=1)
    assert not (tmp_path / "run").exists()


@here
def test_a_run_goes_on_where_they_cannot_be_had_and_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "images").mkdir()
    for i in range(40):
        Image.effect_noise((16, 16), 50).save(tmp_path / "images" / f"{i}.png")
    asked = {"out": tmp_path / "run", "kernels": "native", "precision": "bfloat16", "epochs": 1, "device": "cpu"}
    pretrain(str(tmp_path / "images"), "mae", **asked)
    assert "torch's go on" not in capsys.readouterr().out
    for module in (pictures, trained):
        monkeypatch.setattr(module, "missing", lambda: "native kernels cannot be had here, since g++ was not found")
    (tmp_path / "run" / "summary.txt").unlink()  # as if it had been killed while its pictures were drawn
    pretrain(str(tmp_path / "images"), "mae", **asked)
    said = "native kernels cannot be had here, since g++ was not found: torch's go on, and last digits differ"
    assert said in capsys.readouterr().out
