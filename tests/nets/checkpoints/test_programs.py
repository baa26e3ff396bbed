"""Files of the authors' programs: recognition, translation, rejected and unused weights."""

import re

import pytest
import torch
from golden import PROGRAMS, Oracle, close
from published import ours, same, theirs, written
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.evaluate.settings import EvalSettings, open_subjects
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.fit import inherit, load_bare_module, load_pretrained, load_published
from patchloom.nets.checkpoints.origin import Weights, infer_architecture, public_shape
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.patches.tokens import unpatchify
from patchloom.runs.checkpoint import restore, tensors_of
from patchloom.runs.encoder import has_teacher
from patchloom.tasks import build_task
from patchloom.tasks.restore import Restore

AGREEMENT, TEACHER = "questions.agreement", "questions.agreement.teacher"


@pytest.mark.parametrize("name", ["lut", "extrema"])
def test_student_and_teacher_are_distinguished(tmp_path, name):
    oracle = Oracle(name)
    path = written(tmp_path / "theirs.pth", oracle.saved())
    student, teacher = (oracle.encoder(class_token=name == "lut") for _ in range(2))
    load_published(student, path, task=name)
    done = load_published(teacher, path, task="mae", network="teacher")
    by_default = load_published(oracle.encoder(class_token=name == "lut"), path, task="mae")
    assert by_default.source.endswith(", its teacher)") == (name == "extrema")  # LUT's program has no probe
    assert done.source.endswith(", its teacher)")
    own = "t.blocks.0.attn.qkv.weight" if name == "lut" else "w.momentum_encoder.blocks.0.attn.qkv.weight"
    assert torch.equal(teacher.state_dict()["blocks.0.attn.qkv.weight"], oracle[own])
    assert torch.equal(student.state_dict()["norm.bias"], oracle.under("w.")["encoder.norm.bias"])


def inherited(tmp_path, name, options, saved=None):
    """Load a program's encoder and the rest of its file into a task; return both, what changed, and the sentences."""
    oracle, own = Oracle(name), {"name": PROGRAMS[name].task} | options
    vit = oracle.encoder(**({"class_token": False} if name == "extrema" else {}))
    done = load_published(vit, written(tmp_path / "theirs.pth", saved or oracle.saved()), task=own["name"])
    task = build_task(own, vit)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    said = inherit(done.foreign, task, own["name"] == oracle.program.task, "theirs.pth")
    changed = {name for name, value in task.state_dict().items() if not torch.equal(value, before[name])}
    return task, {name for name in changed if not name.startswith("encoder.")}, said


DECODER = {"decoder_width": 24, "decoder_depth": 1, "decoder_heads": 4}
DEEPER = DECODER | {"decoder_depth": 2, "pixels": True, "pixel_decoder_depth": 2}
# a program; options of a task; beginnings of the names that are taken; advice for those that are not
LEFT_OUT = {
    "another task": ("mae", {"name": "droppos"}, (), "pixel decoder, which are left out: --task mae continues"),
    "deeper decoder": ("droppos_plain", DEEPER, ("position_token",), "4 heads: give --task.decoder_depth 1 to take it"),
    "deeper pixels": (
        "droppos_plain",
        DEEPER,
        ("position_token",),
        "4 heads: give --task.pixel_decoder_depth 1 to take",
    ),
    "wider decoder": ("mae", DECODER | {"decoder_width": 32}, (), "4 heads: give --task.decoder_width 24 to take it"),
    "more heads": ("mae", DECODER | {"decoder_heads": 8}, ("questions.pixels",), "pixel decoder"),
    "narrower heads": (
        "extrema",
        {"head_width": 24, "head_out": 16},
        (f"{AGREEMENT}.instance_head.", f"{TEACHER}.instance_head.", f"{TEACHER}.encoder."),
        "projection (0.bias is 40 there and 24 here)",
    ),
    "less class attention": (
        "extrema",
        {"head_width": 40, "head_out": 16, "attention_blocks": 1},
        (f"{AGREEMENT}.projection.", f"{AGREEMENT}.prediction.", f"{TEACHER}.projection.", f"{TEACHER}.encoder."),
        "class attention (it is 2 deep: give --task.attention_blocks 2 to take it)",
    ),
}


@pytest.mark.parametrize(("name", "options", "taken", "said"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_parts_that_do_not_fit_are_left_out_with_advice(tmp_path, name, options, taken, said):
    _, changed, sentences = inherited(tmp_path, name, options)
    assert all(any(one.startswith(part) for one in changed) for part in taken)
    assert all(one.startswith(taken) for one in changed)
    assert said in " ".join(sentences)


def test_a_missing_teacher_starts_as_its_student_and_nonfinite_weights_are_left_out(tmp_path):
    oracle = Oracle("lut")
    saved = oracle.saved()
    del saved["model_ema"]
    saved["model"]["predictor.0.weight"] = torch.full_like(oracle["w.predictor.0.weight"], torch.nan)
    options = oracle.decoder_options() | {"head_width": oracle.config.get("mlp")}
    task, _, (taken, left) = inherited(tmp_path, "lut", options, saved)
    assert "Left out: prediction (0.weight has values that are not finite" in left and ";" not in left
    agreement = task.questions["agreement"]
    for name, value in agreement.projection.state_dict().items():
        assert torch.equal(value, oracle[f"w.head.{name}"])
        assert torch.equal(value, agreement.teacher.projection.state_dict()[name])


def test_positions_of_beyond_maskings_decoder_are_kept_by_checkpoints(tmp_path):
    oracle = Oracle("mask_zoom_in")

    def task():
        torch.manual_seed(1)
        return Restore(oracle.encoder(class_token=False), **oracle.decoder_options())

    begun, usual = task(), task()
    assert not any("positions" in name for name in usual.state_dict())
    oracle.load(begun)
    resumed = task()
    restore(tensors_of(begun, torch.optim.AdamW(begun.parameters())), resumed)
    close(resumed.questions["pixels"].decoder.positions, oracle["decoder_pos"][0])
    assert resumed.state_dict().keys() == begun.state_dict().keys()


def moved(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def simmim(state):
    """Return weights of a ViT with LayerScale by SimMIM's names, with biases of positions and of queries and values."""
    named = {"mask_token": torch.randn(1, 1, len(state["norm.bias"]))}
    named["rel_pos_bias.relative_position_bias_table"] = torch.randn(52, 2)
    named["rel_pos_bias.relative_position_index"] = torch.zeros(17, 17, dtype=torch.int64)
    for name, value in state.items():
        if name.endswith("qkv.bias"):
            named[name.replace("qkv.bias", "q_bias")], _, named[name.replace("qkv.bias", "v_bias")] = value.chunk(3)
        elif name != "pos_embed":
            named[re.sub(r"ls(\d)\.gamma", r"gamma_\1", name)] = value
    return moved(named, "encoder.") | {"decoder.0.weight": torch.randn(48, 32, 1, 1), "decoder.0.bias": torch.randn(48)}


def test_simmim_is_a_start_and_never_evaluated(tmp_path):
    state = simmim(theirs(init_values=0.1).state_dict())
    vit = ours(positions="sincos", init_values=0.1)
    before = vit.pos_embed.clone()
    done = load_published(vit, written(tmp_path / "simmim.pth", {"model": state, "epoch": 799}), task="simmim")
    assert done.lost == ("rel_pos_bias.relative_position_bias_table",) and torch.equal(vit.pos_embed, before)
    assert done.missing == ("pos_embed",) and "NOT the encoder that was trained" in done.sentences()[1]
    q, k, v = vit.state_dict()["blocks.1.attn.qkv.bias"].chunk(3)
    assert torch.equal(q, state["encoder.blocks.1.attn.q_bias"]) and not k.any()
    assert torch.equal(v, state["encoder.blocks.1.attn.v_bias"])
    task = build_task({"name": "simmim"}, vit)
    assert inherit(done.foreign, task, True, "x") == ["Also loaded, from SimMIM: mask token, pixel decoder."]
    assert torch.equal(task.mask_token, state["encoder.mask_token"].flatten())
    tokens = torch.randn(2, 16, 32)
    conv = nn.functional.conv2d(tokens.mT.unflatten(2, (4, 4)), state["decoder.0.weight"], state["decoder.0.bias"])
    pixels = nn.Linear.forward(task.questions["pixels"].decoder, tokens)
    close(unpatchify(pixels, (4, 4), (4, 4)), nn.functional.pixel_shuffle(conv, 4))
    path = written(tmp_path / "wide.pth", {"model": simmim(tiny(init_values=0.1).state_dict())})
    shape = public_shape(Weights(path))
    assert "positions" not in shape and shape["options"]["init_values"] == 0.1
    with pytest.raises(PatchloomError, match="cannot be evaluated as a plain ViT: it has .*position_bias_table"):
        load_pretrained(path)


def sized(width, depth, patch=16, grid=14, class_token=True, **more):
    """Names and shapes of an encoder of any size; no values are needed."""
    state = {"patch_embed.proj.weight": torch.zeros(width, 3, patch, patch), "norm.weight": torch.zeros(width)}
    state |= {f"blocks.{i}.norm1.weight": torch.zeros(width) for i in range(depth)}
    state["blocks.0.mlp.fc1.weight"] = torch.zeros(4 * width, width)
    state["pos_embed"] = torch.zeros(1, grid**2 + class_token, width)
    return state | ({"cls_token": torch.zeros(1, 1, width)} if class_token else {}) | more


@pytest.mark.parametrize(
    ("state", "model", "heads", "side", "options"),
    [
        (sized(192, 12), "vit_tiny_patch16_224", 3, 224, {}),
        (sized(384, 12, 8, 28), "vit_small_patch8_224", 6, 224, {}),
        (sized(768, 12, 14, 37), "vit_base_patch16_224", 12, 518, {}),
        (sized(1024, 24, class_token=False), "vit_large_patch16_224", 16, 224, {"class_token": False}),
        (sized(1280, 32, 14, 16), "vit_huge_patch14_224", 16, 224, {}),
    ],
)
def test_usual_sizes_are_known(state, model, heads, side, options):
    found, patch = infer_architecture(state), state["patch_embed.proj.weight"].shape[-1]
    assert found.spec == EncoderSpec(model, (side, side), patch, 3, "learned", options) and found.heads == heads
    assert infer_architecture(state | {"pos_embed": torch.zeros(1, 199, found.width)}) is None
    assert infer_architecture({name: value for name, value in state.items() if "fc1" not in name}) is None


def test_the_number_of_heads_is_not_assumed_for_other_sizes_and_is_12_in_mocos_small_vit(tmp_path):
    assert infer_architecture(sized(384, 11)) is None and infer_architecture(sized(400, 12)) is None
    vit = theirs(32, 16, embed_dim=384, depth=1, num_heads=12).state_dict()
    state = moved(vit, "module.base_encoder.") | moved(vit, "module.momentum_encoder.")
    path = written(tmp_path / "moco.pth.tar", {"state_dict": state})
    assert Weights(path).architecture.spec.options == {"depth": 1, "num_heads": 12}
    assert load_pretrained(path)[0].blocks[0].attn.num_heads == 12
    with pytest.raises(PatchloomError, match="of MoCo v3, .* has 12 attention heads, .* 6: give --model.num_heads 12"):
        load_published(ours(32, 16, embed_dim=384, depth=1, num_heads=6), path)


def tiny(**options):
    """An encoder of the smallest usual width, one block deep."""
    return theirs(224, 16, embed_dim=192, depth=1, num_heads=3, **options)


def test_an_encoder_without_a_models_name(tmp_path):
    source = tiny()
    fixed = build_encoder(EncoderSpec("vit_tiny_patch16_224", (224, 224), 16, options={"depth": 1})).pos_embed
    state = dict(source.state_dict()) | {"pos_embed": fixed.detach()}
    path = written(tmp_path / "mae_pretrain.pth", {"model": state})
    vit, card = load_pretrained(path)
    source.load_state_dict(state)
    same(vit, source, torch.randn(1, 3, 224, 224), 1e-5)
    assert card.mean == (0.485, 0.456, 0.406) and card.spec.positions == "sincos" and not vit.training
    assert "(192 wide, 1 deep, patches of 16 pixels); 3 attention heads are assumed" in card.note
    assert "Images are normalised as in MAE or a program built upon it: mean 0.485" in card.note
    shape = public_shape(Weights(path))
    assert shape["positions"] == "sincos" and shape["options"] == {"depth": 1} and "model" not in shape
    assert public_shape(Weights(path), "vit_tiny_patch16_224")["positions"] == "sincos"

    # MoCo's table begins with the row, which identifies its converted files; learned ones identify no program
    swapped, learned = torch.cat([fixed[:, :1], fixed[:, 1:].roll(96, 2)], dim=1), torch.randn(1, 197, 192)
    assert Weights(written(path, state | {"pos_embed": swapped})).program.name == "MoCo v3"
    written(path, state | {"pos_embed": learned})
    with pytest.raises(PatchloomError, match="weights alone, .* number of attention heads .*: give its name in timm"):
        load_pretrained(path)
    deep = sized(384, 12) | {f"blocks.{i}.norm2.weight": torch.zeros(384) for i in range(12)}
    with pytest.raises(PatchloomError, match="vit_small_patch16_224 .384 wide, .* with the tag .*dino"):
        load_pretrained(written(tmp_path / "dino_deitsmall16_pretrain.pth", deep))


@pytest.fixture
def extrema():
    """A small task, and its file: the student's weights are the teacher's plus one."""
    sizes = {"depth": 1, "class_token": False}
    vit = build_encoder(EncoderSpec("vit_tiny_patch16_224", (224, 224), 16, options=sizes))
    task = build_task({"name": "extrema", "head_width": 24, "head_out": 8}, vit)
    inside = {"encoder.": "", "instance_head.token": "cls_token", "instance_head.layers.": "blocks_token."}
    inside |= {"projection.": "head."}
    state = {}
    for name, value in task.agreement.teacher.state_dict().items():
        part = next(word for word in inside if name.startswith(word))
        named = f"{inside[part]}{name.removeprefix(part)}"
        state |= {f"module.momentum_encoder.{named}": value, f"module.base_encoder.{named}": value + 1}
    return task, state


def test_extremas_heads_can_be_evaluated(extrema, tmp_path):
    task, state = extrema
    path = written(tmp_path / "extrema.pth", {"state_dict": state})
    head, stem = load_bare_module(path, "pooling"), load_bare_module(path, "stem")
    assert isinstance(head, InstanceHead) and isinstance(stem, Stem)
    assert not head.training and stem.pooling == "instance"
    tokens = torch.randn(2, 5, 192)
    close(head(tokens), task.agreement.teacher.instance_head(tokens))
    close(stem(tokens), task.agreement.teacher.projection[:3](tokens))
    vit, card = load_pretrained(path)
    assert card.task == "ExtreMA" and not vit.has_class_token
    same(vit, task.encoder.eval(), torch.randn(1, 3, 224, 224))
    del state["module.momentum_encoder.blocks_token.0.gamma_1"]
    with pytest.raises(PatchloomError, match="lacks a part of ExtreMA's heads"):
        load_bare_module(written(tmp_path / "broken.pth", {"state_dict": state}), "pooling")
    assert load_bare_module(written(tmp_path / "plain.pth", tiny().state_dict()), "pooling") is None


def test_the_network_of_a_file_is_the_one_that_its_program_evaluates(extrema, tmp_path):
    """ExtreMA probes the teacher, with its own class attention, and fine-tunes the student."""
    path, state = written(tmp_path / "both.pth", {"state_dict": extrema[1]}), extrema[1]
    usual, student = EvalSettings(), EvalSettings(network="student")
    for settings, tuned, home in ((usual, False, "momentum"), (usual, True, "base"), (student, False, "base")):
        ours = open_subjects(path, settings, tuned=tuned, head=True).ours
        assert torch.equal(ours.vit.state_dict()["norm.bias"], state[f"module.{home}_encoder.norm.bias"])
        assert torch.equal(ours.head.token, state[f"module.{home}_encoder.cls_token"])
    plain = written(tmp_path / "plain.pth", tiny().state_dict())
    assert has_teacher(path) and not has_teacher(plain)
    with pytest.raises(PatchloomError, match="has no teacher beside a student: leave out --network"):
        open_subjects(plain, EvalSettings(network="teacher"))


def fitting_task(oracle: Oracle):
    c, name = oracle.config, oracle.program.task
    sizes = {"head_width": c.get("mlp")} if name in ("lut", "extrema") else {}
    sizes |= {"head_out": c.get("proj")} if name == "extrema" else oracle.decoder_options()
    sizes |= {"pixels": True, "pixel_decoder_depth": c["ddepth"]} if c.get("multi_task") else {}
    return build_task({"name": name} | sizes, oracle.encoder(class_token=name not in ("extrema", "restore")))


@pytest.mark.parametrize("name", PROGRAMS)
def test_damaged_weights_are_rejected_in_a_sentence_or_left_out(tmp_path, name):
    oracle = Oracle(name)
    odd = (torch.tensor(1.0), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, 2, 2), torch.zeros(0))
    task = fitting_task(oracle)
    for i, damaged in enumerate(one for one in sorted(oracle.theirs("w.")) if ".1." not in one):
        state = next(state for state in oracle.saved().values() if isinstance(state, dict))
        state[damaged if damaged in state else f"module.{damaged}"] = odd[i % len(odd)]
        weights = Weights(written(tmp_path / "damaged.pth", {"model": state}))
        if (found := weights.foreign) is None:
            continue
        infer_architecture(found.encoder("student"), found.program)
        try:
            load_published(task.encoder, weights, task=found.program.task)
            assert inherit(found, task, True, "damaged.pth")
        except PatchloomError as refusal:
            assert "\n" not in str(refusal)


def test_a_file_that_fits_two_programs_is_read_as_one_of_them(tmp_path):
    mae, droppos = Oracle("mae"), Oracle("droppos")
    mixed = {"one": mae.theirs("w."), "two": droppos.theirs("w.")}
    vit = droppos.encoder()
    done = load_published(vit, written(tmp_path / "mixed.pth", mixed))
    assert done.foreign.program.name == "DropPos" and f"{len(mixed['one'])} tensors of one" in done.unexpected
    assert torch.equal(vit.state_dict()["cls_token"], mixed["two"]["cls_token"])
