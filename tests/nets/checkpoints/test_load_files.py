"""Files of weights: wrappers and prefixes are recognised, and no pickle is executed."""

import argparse
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from published import ours, same, theirs, written

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.load import load_published

WRAPPINGS = {
    "model": lambda state: {"model": state, "epoch": 3},
    "state_dict": lambda state: {"state_dict": OrderedDict(state), "args": argparse.Namespace(lr=1.0)},
    "deep": lambda state: {"checkpoint": {"net": {"ema": state}}},
    "module": lambda state: {f"module.{name}": value for name, value in state.items()},
    "module.backbone": lambda state: {"model": {f"module.backbone.{name}": value for name, value in state.items()}},
    "any": lambda state: {"x": {f"a.b.vit_3.{name}": value for name, value in state.items()}},
}


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_wrappers_and_prefixes_are_recognised(tmp_path, kind):
    source, vit = theirs(), ours()
    done = load_published(vit, written(tmp_path / "weights.pth", WRAPPINGS[kind](dict(source.state_dict()))))
    same(vit, source, torch.randn(1, 3, 16, 16))
    assert not done.missing + done.unexpected + done.resampled
    place = {"deep": "checkpoint.net.ema", "module.backbone": "model.module.backbone", "any": "x.a.b.vit_3"}
    assert done.source == f"{tmp_path}/weights.pth ({place.get(kind, kind)})"


@pytest.mark.parametrize("nested", [True, False])
def test_the_teacher_is_preferred_and_the_rest_is_reported(tmp_path, nested):
    student, teacher = theirs(seed=1).state_dict(), theirs(seed=2).state_dict()
    head = {"head.mlp.0.weight": torch.zeros(3, 3)}
    states = {
        "student": {f"module.backbone.{name}": value for name, value in student.items()},
        "teacher": {f"backbone.{name}": value for name, value in teacher.items()} | head,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}},
    }
    if not nested:
        states = {f"{path}.{name}": value for path, part in states.items() for name, value in part.items()}
        states = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
    vit = ours()
    done = load_published(vit, written(tmp_path / "weights.pth", states))
    same(vit, theirs(seed=2), torch.randn(1, 3, 16, 16))
    assert done.source.endswith("weights.pth (teacher, of DINO)") and not done.missing
    if nested:
        expected = ("head.mlp.0.weight (DINO's head)", f"{len(student)} tensors of student", "2 tensors of optimizer")
        assert done.unexpected == expected
    else:
        assert len(done.unexpected) == len(student) + 1


def test_a_decoder_with_as_many_blocks_is_not_the_encoder(tmp_path):
    source, other = theirs(seed=1), theirs(seed=2, embed_dim=16, img_size=24)
    state = {f"predictor.{name}": value for name, value in other.state_dict().items()}
    state |= {f"encoder.{name}": value for name, value in source.state_dict().items()}
    vit = ours()
    assert load_published(vit, written(tmp_path / "weights.pth", state)).source.endswith("(encoder)")
    same(vit, source, torch.randn(1, 3, 16, 16))


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
    """Object whose unpickling touches a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Call(Bomb):
    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("kind", [Bomb, Call])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_a_pickle_is_never_run(tmp_path, monkeypatch, kind, raw, forced):
    if forced:  # torch's escape hatch would switch its safeguard off
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    bomb, path = tmp_path / "bomb", tmp_path / "weights.pth"
    hostile = dict(theirs().state_dict()) | {"head": kind(bomb)}
    if raw:
        path.write_bytes(pickle.dumps(kind(bomb)))
    else:
        torch.save(hostile, path)
    with pytest.raises(PatchloomError, match="and was not loaded") as refusal:
        load_published(ours(), path)
    assert "\n" not in str(refusal.value) and not bomb.exists()
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
    whole = {suffix: written(tmp_path / f"whole.{suffix}", theirs().state_dict()) for suffix in ("pth", "safetensors")}
    cases = {}
    for suffix, path in whole.items():
        content = path.read_bytes()
        cases |= {f"cut.{suffix}": content[: len(content) // 2], f"empty.{suffix}": b"", f"text.{suffix}": b"hello\n"}
    cases["short.pth"] = whole["pth"].read_bytes()[:3]
    cases["renamed.pth"] = whole["safetensors"].read_bytes()
    itself: dict = {}
    itself["again"] = itself
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    written(tmp_path / "itself.pth", itself)
    (tmp_path / "folder.pth").mkdir()
    for name in (*cases, "itself.pth", "folder.pth", "absent.pth"):
        with pytest.raises(PatchloomError, match=name) as refusal:
            load_published(ours(), tmp_path / name)
        assert "\n" not in str(refusal.value), name
