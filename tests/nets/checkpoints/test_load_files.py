"""Files of weights: wrappers, prefixes and other programs' names are recognised, and no pickle is executed."""

import argparse
import pickle
import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from published import ours, same, theirs, written
from refusing import refusal

from patchloom.nets.checkpoints.fit import load_published

OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}}
HEAD = {"head.mlp.0.weight": torch.zeros(3, 3), "head.last_layer.weight_v": torch.zeros(3, 3)}
SCALED = {"init_values": 0.5}
REGISTERS = SCALED | {"reg_tokens": 2, "no_embed_class": True}


def under(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def flat(states):
    return {f"{part}.{name}": value for part, state in states.items() for name, value in state.items()}


def dino(student, teacher):
    return {
        "student": under("module.backbone.", student) | under("module.", HEAD),
        "teacher": under("backbone.", teacher) | HEAD,
    }


def moco(student, teacher):
    other = {"module.predictor.0.weight": torch.zeros(3), "module.base_encoder.head.0.weight": torch.zeros(3)}
    return under("module.base_encoder.", student) | under("module.momentum_encoder.", teacher) | other


def dinov2(state, chunked=False):
    """Return DINOv2's state dict: the registers have no positions, and blocks may be in chunks."""
    state = dict(state) | {"mask_token": torch.randn(1, 32)}
    if "reg_token" in state:
        entry = torch.randn(1, 1, 32)
        state |= {"register_tokens": state.pop("reg_token"), "cls_token": state["cls_token"] - entry}
        state["pos_embed"] = torch.cat([entry, state["pos_embed"]], dim=1)
    return {
        re.sub(r"blocks\.(\d)\.", r"blocks.\1.\1." if chunked else r"blocks.\1.", name): state[name] for name in state
    }


def apart(state):
    """Return a state dict with separate queries, keys and values."""
    thirds = {
        name.replace("qkv", one): part
        for name, value in state.items()
        if ".qkv." in name
        for one, part in zip("qkv", value.chunk(3), strict=True)
    }
    return {name: value for name, value in state.items() if ".qkv." not in name} | thirds


DECODER = under("predictor.", theirs(seed=2, embed_dim=16, img_size=24).state_dict())  # with as many blocks
# options of the encoder; the file's content, from the encoder's weights and others; the place of the weights; leftovers
FORMATS = {
    "model": ({}, lambda own, other: {"model": own, "epoch": 3}, "model", ()),
    "arguments": ({}, lambda own, other: {"net": OrderedDict(own), "args": argparse.Namespace(lr=1.0)}, "net", ()),
    "deep": ({}, lambda own, other: {"checkpoint": {"net": {"ema": own}}}, "checkpoint.net.ema", ()),
    "prefix": ({}, lambda own, other: {"x": under("a.b.vit_3.", own)}, "x.a.b.vit_3", ()),
    "decoder": ({}, lambda own, other: DECODER | under("encoder.", own), "encoder", tuple(DECODER)),
    "separate": ({}, lambda own, other: apart(own), "", ()),
    "DINO": (
        {},
        lambda own, other: dino(other, own) | {"optimizer": OPTIMIZER},
        "teacher, of DINO",
        ("head.mlp.0.weight and 1 more (DINO's head)", "32 tensors of student", "2 tensors of optimizer"),
    ),
    "DINO, flat": ({}, lambda own, other: flat(dino(other, own)), "teacher, of DINO", None),
    "MoCo v3": ({}, lambda own, other: {"state_dict": moco(own, other)}, "state_dict.module, of MoCo v3", None),
    "DINOv2": (SCALED, lambda own, other: dinov2(own), "of DINOv2", ("mask_token (for DINOv2's own masks)",)),
    "DINOv2, registers": (REGISTERS, lambda own, other: dinov2(own), "of DINOv2", None),
    "DINOv2, chunks": (
        REGISTERS,
        lambda own, other: {"teacher": under("backbone.", dinov2(own, chunked=True))},
        "teacher.backbone, of DINOv2",
        None,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_recognised_and_the_rest_is_reported(tmp_path, name):
    options, file, place, left = FORMATS[name]
    source, other = theirs(seed=1, **options), theirs(seed=2, **options)
    path = written(tmp_path / "weights.pth", file(dict(source.state_dict()), dict(other.state_dict())))
    vits = [ours(**options)]
    if "reg_tokens" in options:  # and with entries of the position table for class token and registers
        vits.append(ours(**options | {"no_embed_class": False}))
    for vit in vits:
        done = load_published(vit, path)
        same(vit, source, torch.randn(1, 3, 16, 16), 1e-5 if "DINOv2" in name else 0)
        assert not done.missing and not done.lost
    assert done.source == f"{path} ({place})" if place else done.source == str(path)
    assert left is None or done.unexpected == left


def test_layer_scale_without_a_place_is_lost(tmp_path):
    path = written(tmp_path / "dinov2.pth", dinov2(theirs(**SCALED).state_dict()))
    done = load_published(ours(), path)
    assert len(done.lost) == 4 and "--model.init_values 1 makes one" in " ".join(done.sentences())


def test_other_contents_of_papers_files_are_skipped(tmp_path, monkeypatch):
    yacs = ModuleType("yacs.config")
    yacs.CfgNode = type("CfgNode", (dict,), {"__module__": "yacs.config", "__qualname__": "CfgNode"})
    monkeypatch.setitem(sys.modules, "yacs", ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", yacs)
    config = yacs.CfgNode({"MODEL": yacs.CfgNode({"DEPTH": 2})})
    config.__dict__["__immutable__"] = True
    groups = [{"lr": np.float64(1e-3), "weight_decay": np.float32(0.05)}]
    beside = {"config": config, "optimizer": {"param_groups": groups}, "args": argparse.Namespace(out=Path("/out"))}
    path, vit = written(tmp_path / "weights.pth", {"model": theirs().state_dict()} | beside), ours()
    monkeypatch.delitem(sys.modules, "yacs.config")
    load_published(vit, path)
    same(vit, theirs(), torch.randn(1, 3, 16, 16))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_a_pickle_is_never_run(tmp_path, monkeypatch, raw, forced):
    if forced:  # torch's escape hatch would switch its safeguard off
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    bomb, path = tmp_path / "bomb", tmp_path / "weights.pth"
    if raw:
        path.write_bytes(pickle.dumps(Bomb(bomb)))
    else:
        torch.save(dict(theirs().state_dict()) | {"head": Bomb(bomb)}, path)
    assert "and was not loaded" in refusal(load_published, ours(), path) and not bomb.exists()
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
    if raw:
        pickle.loads(path.read_bytes())  # checks that the test would notice
        assert bomb.exists()


class Odd:
    """Object that is unpickled as an OrderedDict with a number as ``items``."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return OrderedDict, (), {"items": 3}, None, iter(self.state.items())


def test_a_dict_with_other_attributes_is_a_dict(tmp_path):
    vit = ours()
    load_published(vit, written(tmp_path / "odd.pth", {"model": Odd(theirs().state_dict())}))
    same(vit, theirs(), torch.randn(1, 3, 16, 16))


def test_damaged_files_are_rejected_in_one_sentence(tmp_path):
    pickled, other = (
        written(tmp_path / f"x.{kind}", theirs().state_dict()).read_bytes() for kind in ("pth", "safetensors")
    )
    cases = {"short.pth": pickled[:3], "renamed.pth": other}
    for suffix, content in {"pth": pickled, "safetensors": other}.items():
        cases |= {f"cut.{suffix}": content[: len(content) // 2], f"empty.{suffix}": b"", f"text.{suffix}": b"hello\n"}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    itself: dict = {}
    itself["again"] = itself
    written(tmp_path / "itself.pth", itself)
    (tmp_path / "folder.pth").mkdir()
    for name in (*cases, "itself.pth", "folder.pth", "absent.pth"):
        assert name in refusal(load_published, ours(), tmp_path / name)
