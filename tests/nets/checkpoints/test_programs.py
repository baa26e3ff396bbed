"""Files of the authors' programs: recognition, translation, rejected and unused weights."""

import re

import pytest
import torch
from golden import PROGRAMS, Oracle, close
from published import ours, same, theirs, written
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.load import (
    Weights,
    infer_architecture,
    inherit,
    load_bare_module,
    load_pretrained,
    load_published,
    public_shape,
)
from patchloom.nets.checkpoints.programs import recognise
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.patches.tokens import unpatchify
from patchloom.runs.checkpoint import restore, tensors_of
from patchloom.runs.encoder import has_teacher
from patchloom.tasks import build_task
from patchloom.tasks.restore import Restore

# parts of each program's file besides the encoder that its task loads, as named in the log
BESIDES = {
    "mae": "Also loaded, from MAE: pixel decoder.",
    "droppos": "Also loaded, from DropPos: [MASK] position token, position decoder.",
    "droppos_plain": "Also loaded, from DropPos: [MASK] position token, position decoder, pixel decoder.",
    "lut": "Also loaded, from LUT: pixel decoder, projection, prediction, teacher's projection, teacher's encoder.",
    "extrema": "Also loaded, from ExtreMA: class attention, projection, prediction, teacher's class attention, "
    "teacher's projection, teacher's encoder.",
    "mask_zoom_in": "Also loaded, from Beyond Masking: pixel decoder.",
}


def fitting_task(oracle: Oracle):
    c, sizes = oracle.config, oracle.decoder_options()
    name = oracle.program.task
    options = {"mae": sizes, "droppos": sizes, "lut": sizes | {"head_width": c.get("mlp")}, "restore": sizes}
    options |= {"extrema": {"head_width": c.get("mlp"), "head_out": c.get("proj")}}
    plain = {"class_token": False} if name in ("extrema", "restore") else {}
    more = {"pixels": True, "pixel_decoder_depth": c["ddepth"]} if c.get("multi_task") else {}
    return build_task({"name": name} | options[name] | more, oracle.encoder(**plain))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_complete_task_is_loaded(tmp_path, name, prefix):
    oracle = Oracle(name)
    saved = {part: state for part, state in oracle.saved().items() if isinstance(state, dict)}
    saved = {part: {prefix + key: value for key, value in state.items()} for part, state in saved.items()}
    path, task = written(tmp_path / "theirs.pth", saved), fitting_task(oracle)
    done = load_published(task.encoder, path, task=oracle.program.task)
    assert done.foreign.program is oracle.program and not done.missing and not done.resampled and not done.lost
    assert re.search(rf"theirs.pth \(\S+, of {oracle.program.name}\)$", done.source)
    assert inherit(done.foreign, task, True, "theirs.pth") == [BESIDES[name]]
    expected = oracle.under("w.")
    found = task.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


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


def test_another_task_leaves_the_rest_out_and_names_its_task(tmp_path):
    oracle = Oracle("mae")
    path, vit = written(tmp_path / "mae.pth", oracle.saved()), oracle.encoder()
    done = load_published(vit, path, task="droppos")
    task = build_task({"name": "droppos"}, vit)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    said = inherit(done.foreign, task, False, "mae.pth")
    assert said == ["Besides the encoder it has pixel decoder, which are left out: --task mae continues with them."]
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())


def test_a_decoder_of_other_sizes_is_left_out_with_advice(tmp_path):
    oracle = Oracle("droppos_plain")
    path = written(tmp_path / "theirs.pth", oracle.saved())
    vit = oracle.encoder()
    done = load_published(vit, path, task="droppos")
    options = {"decoder_width": 24, "decoder_depth": 2, "decoder_heads": 4, "pixels": True, "pixel_decoder_depth": 2}
    task = build_task({"name": "droppos"} | options, vit)
    before = {name: value.clone() for name, value in task.questions.state_dict().items()}
    taken, left = inherit(done.foreign, task, True, "theirs.pth")
    assert taken == "Also loaded, from DropPos: [MASK] position token."
    assert "position decoder (it is 24 wide and 1 deep with 4 heads: give --task.decoder_depth 1 to take it)" in left
    assert "--task.pixel_decoder_depth 1 to take it" in left
    assert all(torch.equal(value, before[name]) for name, value in task.questions.state_dict().items())
    # another grid: predictions differ
    task = build_task({"name": "droppos"} | options | {"decoder_depth": 1}, ours(40, 8))
    left = inherit(done.foreign, task, True, "theirs.pth")[1]
    assert "position decoder (answer.bias is 36 there and 25 here)" in left


def test_a_teacher_without_its_students_heads_is_left_out(tmp_path):
    oracle = Oracle("extrema")
    path, vit = written(tmp_path / "theirs.pth", oracle.saved()), oracle.encoder(class_token=False)
    done = load_published(vit, path, task="extrema")
    task = build_task({"name": "extrema", "head_width": 24, "head_out": 16}, vit)
    taken, left = inherit(done.foreign, task, True, "theirs.pth")
    assert "class attention, teacher's class attention, teacher's encoder" in taken
    assert "projection (0.bias is 40 there and 24 here)" in left and "prediction (0.bias" in left
    agreement = task.questions["agreement"]
    pairs = zip(agreement.projection.parameters(), agreement.teacher.projection.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_missing_teacher_starts_as_its_student_and_nonfinite_weights_are_left_out(tmp_path):
    oracle = Oracle("lut")
    saved = oracle.saved()
    del saved["model_ema"]
    saved["model"]["predictor.0.weight"] = torch.full_like(oracle["w.predictor.0.weight"], torch.nan)
    task = fitting_task(oracle)
    done = load_published(task.encoder, written(tmp_path / "theirs.pth", saved), task="lut")
    taken, left = inherit(done.foreign, task, True, "theirs.pth")
    assert left == "Left out: prediction (0.weight has values that are not finite floating-point numbers)."
    agreement = task.questions["agreement"]
    for name, value in agreement.projection.state_dict().items():
        assert torch.equal(value, oracle[f"w.head.{name}"])
        assert torch.equal(value, agreement.teacher.projection.state_dict()[name])


def test_class_attention_of_another_depth_is_left_out_with_advice(tmp_path):
    oracle = Oracle("extrema")
    path, vit = written(tmp_path / "theirs.pth", oracle.saved()), oracle.encoder(class_token=False)
    done = load_published(vit, path, task="extrema")
    options = {"head_width": oracle.config["mlp"], "head_out": oracle.config["proj"], "attention_blocks": 1}
    taken, left = inherit(done.foreign, build_task({"name": "extrema"} | options, vit), True, "theirs.pth")
    assert "projection, prediction" in taken and "class attention" not in taken
    assert "class attention (it is 2 deep: give --task.attention_blocks 2 to take it)" in left


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


def test_dino_and_moco_v3(tmp_path):
    student, teacher = theirs(seed=1), theirs(seed=2)
    head = {"head.mlp.0.weight": torch.zeros(3, 3), "head.last_layer.weight_v": torch.zeros(3, 3)}
    full = {
        "student": moved(student.state_dict(), "module.backbone.") | moved(head, "module."),
        "teacher": moved(teacher.state_dict(), "backbone.") | head,
    }
    vit = ours()
    done = load_published(vit, written(tmp_path / "dino.pth", full))
    assert done.foreign.program.name == "DINO" and "and 1 more (DINO's head)" in done.unexpected[0]
    same(vit, teacher, torch.randn(1, 3, 16, 16))

    state = moved(student.state_dict(), "module.base_encoder.") | moved(
        teacher.state_dict(), "module.momentum_encoder."
    )
    state |= {"module.predictor.0.weight": torch.zeros(3), "module.base_encoder.head.0.weight": torch.zeros(3)}
    done = load_published(vit, written(tmp_path / "moco.pth.tar", {"state_dict": state, "arch": "vit_small"}))
    assert done.foreign.program.name == "MoCo v3" and not done.missing
    same(vit, student, torch.randn(1, 3, 16, 16))  # as evaluated by its authors


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("registers", [0, 2])
def test_dinov2_has_scaled_layers_chunks_and_registers_without_positions(tmp_path, chunked, registers):
    options = {"init_values": 0.5} | ({"reg_tokens": registers, "no_embed_class": True} if registers else {})
    source = theirs(**options)
    state = dict(source.state_dict()) | {"mask_token": torch.randn(1, 32)}
    if registers:
        state["register_tokens"] = state.pop("reg_token")
        entry = torch.randn(1, 1, 32)
        state["cls_token"] = state["cls_token"] - entry
        state["pos_embed"] = torch.cat([entry, state["pos_embed"]], dim=1)
    if chunked:
        state = {re.sub(r"blocks\.(\d)\.", r"blocks.\1.\1.", name): value for name, value in state.items()}
    path = written(tmp_path / "dinov2.pth", {"teacher": moved(state, "backbone.")} if chunked else state)
    vit = ours(**options)
    done = load_published(vit, path)
    assert done.foreign.program.name == "DINOv2" and not done.missing
    assert done.unexpected == ("mask_token (for DINOv2's own masks)",)
    same(vit, source, torch.randn(1, 3, 16, 16), 1e-5)
    with_entries = ours(**{name: value for name, value in options.items() if name != "no_embed_class"})
    load_published(with_entries, path)
    same(with_entries, source, torch.randn(1, 3, 16, 16), 1e-5)
    plain = load_published(ours(**{name: value for name, value in options.items() if name != "init_values"}), path)
    assert len(plain.lost) == 4 and "--model.init_values 1 makes one" in " ".join(plain.sentences())


def simmim(vit):
    """SimMIM's names, from a timm ViT with LayerScale: position biases, and separate biases of queries and values."""
    state = {}
    for name, value in vit.state_dict().items():
        if name.endswith("qkv.bias"):
            q, _, v = value.chunk(3)
            state |= {name.replace("qkv.bias", "q_bias"): q, name.replace("qkv.bias", "v_bias"): v}
        elif name != "pos_embed":
            state[re.sub(r"ls(\d)\.gamma", r"gamma_\1", name)] = value
    state["rel_pos_bias.relative_position_bias_table"] = torch.randn(52, 2)
    state["rel_pos_bias.relative_position_index"] = torch.zeros(17, 17, dtype=torch.int64)
    state["mask_token"] = torch.randn_like(state["cls_token"])
    return moved(state, "encoder.") | {"decoder.0.weight": torch.randn(48, 32, 1, 1), "decoder.0.bias": torch.randn(48)}


def test_simmim_is_a_start_and_never_evaluated(tmp_path):
    state = simmim(theirs(init_values=0.1))
    path = written(tmp_path / "simmim.pth", {"model": state, "epoch": 799})
    vit = ours(positions="sincos", init_values=0.1)
    before = vit.pos_embed.clone()
    done = load_published(vit, path, task="simmim")
    assert done.lost == ("rel_pos_bias.relative_position_bias_table",) and torch.equal(vit.pos_embed, before)
    assert done.missing == ("pos_embed",)
    assert done.sentences()[1] == (
        "This is NOT the encoder that was trained, only a start: it has rel_pos_bias.relative_position_bias_table, for "
        "which this encoder has no place."
    )
    bias = vit.state_dict()["blocks.1.attn.qkv.bias"]
    assert torch.equal(bias[:32], state["encoder.blocks.1.attn.q_bias"]) and not bias[32:64].any()
    assert torch.equal(bias[64:], state["encoder.blocks.1.attn.v_bias"])

    task = build_task({"name": "simmim"}, vit)
    assert inherit(done.foreign, task, True, "x") == ["Also loaded, from SimMIM: mask token, pixel decoder."]
    assert torch.equal(task.mask_token, state["encoder.mask_token"].flatten())
    tokens = torch.randn(2, 16, 32)
    conv = nn.functional.conv2d(tokens.mT.unflatten(2, (4, 4)), state["decoder.0.weight"], state["decoder.0.bias"])
    theirs_pixels = nn.functional.pixel_shuffle(conv, 4)
    ours_pixels = unpatchify(nn.Linear.forward(task.questions["pixels"].decoder, tokens), (4, 4), (4, 4))
    close(ours_pixels, theirs_pixels)
    path = written(tmp_path / "wide.pth", {"model": simmim(tiny(init_values=0.1))})
    assert (
        "positions" not in public_shape(Weights(path)) and public_shape(Weights(path))["options"]["init_values"] == 0.1
    )
    with pytest.raises(PatchloomError, match="cannot be evaluated as a plain ViT: it has .*position_bias_table"):
        load_pretrained(path)


def test_separate_queries_keys_and_values_become_one(tmp_path):
    source = theirs()
    state = {}
    for name, value in source.state_dict().items():
        if ".qkv." in name:
            state |= {name.replace("qkv", f"{one}_proj"): part for one, part in zip("qkv", value.chunk(3), strict=True)}
        else:
            state[name] = value
    vit = ours()
    assert not load_published(vit, written(tmp_path / "apart.pth", state)).missing
    same(vit, source, torch.randn(1, 3, 16, 16))


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
    found = infer_architecture(state)
    assert (found.model, found.heads, found.side, found.options) == (model, heads, side, options)
    assert found.positions == "learned" and found.patch_size == state["patch_embed.proj.weight"].shape[-1]
    assert infer_architecture(state | {"pos_embed": torch.zeros(1, 199, found.width)}) is None
    assert infer_architecture({name: value for name, value in state.items() if "fc1" not in name}) is None


def test_unusual_numbers_of_heads():
    assert infer_architecture(sized(384, 11)) is None and infer_architecture(sized(400, 12)) is None
    moco = recognise(
        [
            (
                "state_dict",
                moved(sized(384, 12), "module.base_encoder.") | moved(sized(384, 12), "module.momentum_encoder."),
            )
        ]
    )
    found = infer_architecture(moco.encoder("student"), moco.program)
    assert found.heads == 12 and found.options == {"num_heads": 12}


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

    # MoCo's table begins with the row, which identifies its converted files
    swapped = torch.cat([fixed[:, :1], fixed[:, 1:].roll(96, 2)], dim=1)
    found = Weights(written(tmp_path / "deit.pth", {"model": state | {"pos_embed": swapped}}))
    assert found.program.name == "MoCo v3"
    # learned positions do not identify a program
    path = written(tmp_path / "anybody.pth", source.state_dict() | {"pos_embed": torch.randn(1, 197, 192)})
    with pytest.raises(
        PatchloomError, match="holds weights alone, .* number of attention heads .*: give its name in timm"
    ):
        load_pretrained(path)
    deep = sized(384, 12) | {f"blocks.{i}.norm2.weight": torch.zeros(384) for i in range(12)}
    with pytest.raises(
        PatchloomError,
        match=r"of the size of vit_small_patch16_224 \(384 wide, .* --model vit_small_patch16_224, with the tag .*dino",
    ):
        load_pretrained(written(tmp_path / "dino_deitsmall16_pretrain.pth", deep))


def test_mocos_small_vit_has_twelve_heads(tmp_path):
    vit = theirs(32, 16, embed_dim=384, depth=1, num_heads=12).state_dict()
    state = moved(vit, "module.base_encoder.") | moved(vit, "module.momentum_encoder.")
    path = written(tmp_path / "moco.pth.tar", {"state_dict": state})
    assert load_pretrained(path)[0].blocks[0].attn.num_heads == 12
    with pytest.raises(
        PatchloomError, match="of MoCo v3, whose encoder has 12 attention heads, and this encoder 6: give --model.num"
    ):
        load_published(ours(32, 16, embed_dim=384, depth=1, num_heads=6), path)


def extrema_tiny(tmp_path):
    sizes = {"depth": 1, "class_token": False}
    vit = build_encoder(EncoderSpec("vit_tiny_patch16_224", (224, 224), 16, options=sizes))
    task = build_task({"name": "extrema", "head_width": 24, "head_out": 8}, vit)
    part = task.agreement.teacher.state_dict()
    inside = {"encoder.": "", "instance_head.token": "cls_token", "instance_head.layers.": "blocks_token."}
    inside |= {"projection.": "head."}
    state = {}
    for name, value in part.items():
        ours_name = next(word for word in inside if name.startswith(word))
        for home in ("base_encoder.", "momentum_encoder."):
            state[f"module.{home}{inside[ours_name]}{name.removeprefix(ours_name)}"] = value
    return task, state, written(tmp_path / "extrema.pth", {"state_dict": state})


def test_extremas_heads_can_be_evaluated(tmp_path):
    task, state, path = extrema_tiny(tmp_path)
    head, stem = load_bare_module(path, "pooling"), load_bare_module(path, "stem")
    assert (
        isinstance(head, InstanceHead) and isinstance(stem, Stem) and not head.training and stem.pooling == "instance"
    )
    images, tokens = torch.randn(1, 3, 224, 224), torch.randn(2, 5, 192)
    close(head(tokens), task.agreement.teacher.instance_head(tokens))
    close(stem(tokens), task.agreement.teacher.projection[:3](tokens))
    vit, card = load_pretrained(path)
    assert card.task == "ExtreMA" and not vit.has_class_token
    same(vit, task.encoder.eval(), images)
    broken = {name: value for name, value in state.items() if not name.endswith("blocks_token.0.gamma_1")}
    with pytest.raises(PatchloomError, match="lacks a part of ExtreMA's heads"):
        load_bare_module(written(tmp_path / "broken.pth", {"state_dict": broken}), "pooling")
    assert load_bare_module(written(tmp_path / "plain.pth", tiny().state_dict()), "pooling") is None


def test_the_network_of_a_file_is_the_one_that_its_program_evaluates(tmp_path):
    """ExtreMA probes the teacher, with its own class attention, and fine-tunes the student."""
    _, state, _ = extrema_tiny(tmp_path)
    for name, value in state.items():
        if name.startswith("module.base_encoder."):
            state[name] = value + 1
    path = written(tmp_path / "both.pth", {"state_dict": state})
    usual, student = EvalSettings(), EvalSettings(network="student")
    for settings, tuned, home in ((usual, False, "momentum"), (usual, True, "base"), (student, False, "base")):
        vit, _ = settings.encoder(path, tuned)
        assert torch.equal(vit.state_dict()["norm.bias"], state[f"module.{home}_encoder.norm.bias"])
        head = settings.extra_module(path, "pooling", tuned)
        assert torch.equal(head.token, state[f"module.{home}_encoder.cls_token"])
    assert has_teacher(path)
    plain = written(tmp_path / "plain.pth", tiny().state_dict())
    assert not has_teacher(plain)
    with pytest.raises(PatchloomError, match="has no teacher beside a student: leave out --network"):
        EvalSettings(network="teacher").encoder(plain)


@pytest.mark.parametrize("name", PROGRAMS)
def test_damaged_weights_are_rejected_in_a_sentence_or_left_out(tmp_path, name):
    oracle = Oracle(name)
    theirs_names = sorted(oracle.theirs("w."))
    odd = (torch.tensor(1.0), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, 2, 2), torch.zeros(0))
    task = fitting_task(oracle)
    for i, damaged in enumerate(theirs_names):
        if ".1." in damaged:
            continue
        saved = oracle.saved()
        states = [state for state in saved.values() if isinstance(state, dict)]
        key = damaged if damaged in states[0] else f"module.{damaged}"
        states[0][key] = odd[i % len(odd)]
        found = recognise([("model", states[0])])
        if found is None:
            continue
        infer_architecture(found.encoder("student"), found.program)
        try:
            load_published(task.encoder, "damaged.pth", foreign=found, task=found.program.task)
            told = inherit(found, task, True, "damaged.pth")
        except PatchloomError as refusal:
            assert "\n" not in str(refusal)
        else:
            assert told


def test_a_file_that_fits_two_programs_is_read_as_one_of_them(tmp_path):
    mae, droppos = Oracle("mae"), Oracle("droppos")
    mixed = {"one": mae.theirs("w."), "two": droppos.theirs("w.")}
    vit = droppos.encoder()
    done = load_published(vit, written(tmp_path / "mixed.pth", mixed))
    assert done.foreign.program.name == "DropPos" and f"{len(mixed['one'])} tensors of one" in done.unexpected
    assert torch.equal(vit.state_dict()["cls_token"], mixed["two"]["cls_token"])
