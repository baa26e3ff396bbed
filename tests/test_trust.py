"""Untrusted files: a run, a card, a configuration or a table runs no code and fetches nothing.

Each case forges a file as its author would, with the right checksums, and looks for a trace of its code.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
import re
import shutil
import socket
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from exporting import SMALL, a_run, an_encoder, photographs, with_card
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from refusing import failed, refusal
from safetensors.torch import save_file
from small import forget
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

import patchloom
from patchloom.audio.config import Sound, sound_from
from patchloom.cli import main
from patchloom.compare import plan as comparing
from patchloom.compare import runner
from patchloom.data.decode import Unreadable, decode_image, read_image
from patchloom.data.sources.glob import absolute_pattern, may_search_disc
from patchloom.data.sources.open import open_data, open_stored
from patchloom.data.sources.urls import expand_braces, find_remote
from patchloom.dense.checkpoint import load_dense
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.export.export import export
from patchloom.nets.build import OPTIONS, EncoderSpec, build_encoder, check_model_options, stock_encoder
from patchloom.nets.checkpoints import format
from patchloom.nets.checkpoints.format import (
    EncoderCard,
    load_encoder_file,
    save_encoder,
    save_extra_module,
)
from patchloom.nets.checkpoints.read import read_weights
from patchloom.nets.heads import InstanceHead
from patchloom.options.parse import VERBS, parse_call, parse_pretrain
from patchloom.options.verbs import Compare
from patchloom.report.pictures import collect_pictures, images_of
from patchloom.results import store
from patchloom.runs.encoder import named_extra_module
from patchloom.runs.folder import RunFolder
from patchloom.runs.past import load_run
from patchloom.runs.task import load_task
from patchloom.system import network
from patchloom.system.checksummed import read_checksummed, write_checksummed
from patchloom.system.files import append
from patchloom.tasks import custom


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return photographs(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def made(photos, tmp_path_factory) -> Path:
    """A run and an encoder; each test forges a copy."""
    folder = tmp_path_factory.mktemp("made")
    a_run(folder / "run", photos)
    an_encoder(folder / "encoder", photos)
    return folder


@pytest.fixture
def run(made, tmp_path) -> Path:
    """The folder of a finished run, as it came in an archive."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def encoder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "encoder", tmp_path / "encoder"), "e.safetensors")


@pytest.fixture(autouse=True)
def met_nothing(monkeypatch):
    monkeypatch.setattr(custom, "_HERE", {})
    monkeypatch.setattr(custom, "_TYPED", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    forget()


@pytest.fixture
def home():
    """A web address on this machine, which fails the test if anything connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        door.setblocking(False)
        with pytest.raises(BlockingIOError):
            door.accept()


def forged(run: Path, **values: Any) -> Path:
    """Change the settings of a run, with the checksums of patchloom, and return the run."""
    for name in ("config.yaml", "requested.yaml"):
        path = run / name
        before = read_checksummed(path) if path.exists() else read_checksummed(run / "config.yaml")
        write_checksummed(path, before | values)
    return run


def look(capsys, run: Path) -> str:
    """Return the error message of ``look`` on the run's own images."""
    return failed(capsys, "look", run, "--what", "features")


# ---- data: commands and addresses

COMMANDS = (  # which touch {}
    *("pipe:touch {}", "{{pipe:touch {} ;echo ,pipe:true ;#}}.tar", "{{{{pipe:touch {},x}},y}}.tar", "PIPE:touch {}"),
    *("{{pi,po}}pe:touch {}.tar", "pipe{{:touch {},x}}.tar", "pipe:touch {}{{,x}}", "pipe:touch {}{{0..1}}.tar"),
    *("shapes:10,pipe:touch {}", "a.tar, pipe:touch {}", "PiPe:touch {}.tar", "  pipe:touch {}"),
    *("a.tar,{{b,pipe:touch {}}}.tar", "file:///x::pipe:touch {}", "x/../pipe:touch {}.tar"),
)
ADDRESSES = (  # of the server at {}
    *("{}/x.tar", "{}/x-{{0..2}}.tar", "simplecache::{}/x.tar", "filecache::{}/x.tar", "blockcache::{}/x.tar"),
    *("zip://x.tar::{}/x.zip", "{{{},a}}/x.tar", "a.tar,{}/x.tar", " {}/x.tar", "reference://::{}/x.json"),
    *("tar://x::{}/a.tar", "file:///a.tar::{}/a.tar", "file:///a/../{}/b.tar"),
)
REMOTE = (
    *("s3://bucket/x.tar", "gs://b/x.tar", "hf://datasets/a/b.tar", "github://o:r@m/x", "ftp://h/x", "memory://x"),
    *("hf:nobody/nothing", "hf:nobody/nothing@config", "cifar10", "food101@/nowhere", "HTTP://h/x.tar"),
)


def test_no_data_that_a_file_names_is_run_or_fetched(home, tmp_path, monkeypatch):
    """Neither commands nor addresses nor data sets, however they are hidden, alone or in a list."""
    touched = tmp_path / "touched"
    for place in ("utils.download_url", "cifar.download_and_extract_archive", "food101.download_and_extract_archive"):
        monkeypatch.setattr(f"torchvision.datasets.{place}", lambda *given: pytest.fail("something is fetched"))
    monkeypatch.setattr("datasets.load_dataset", lambda *given, **named: pytest.fail("something is fetched"))
    for name in (*(one.format(touched) for one in COMMANDS), *(one.format(home) for one in ADDRESSES), *REMOTE):
        for data in (name, ["shapes:10", name]):
            assert "type" in refusal(open_stored, data, "a run", "")
    assert not [*tmp_path.glob("touched*")]
    with pytest.raises(PatchloomError, match="not a tar file|truncated"):
        open_data(f"{{pipe:touch {touched};echo ,pipe:true ;#}}.tar")
    assert touched.exists(), "it is run if it is typed"


def test_no_verb_runs_or_fetches_the_data_of_a_run(run, home, tmp_path, capsys):
    for name in (f"{{pipe:touch {tmp_path}/touched ;echo ,pipe:true ;#}}.tar", f"{home}/x.tar", "cifar10"):
        forged(run, data=name)
        assert "type" in look(capsys, run)
        assert images_of(load_run(run)).shown is None
        assert "Compared on noise" in export(run).notes[0]
    assert not [*tmp_path.glob("touched*")]


def test_what_is_here_is_still_found(run, photos, tmp_path, monkeypatch):
    write_checksummed(run / "data.yaml", MEASURED)
    assert patchloom.look(run, what="features")  # its folder of images
    for name in (f"{photos}/*.png", f"{photos}/{{0,2}}.png", f"{photos}/0.png,{photos}/2.png", "shapes:10", "digits"):
        assert find_remote(name) is None and open_stored(name, "a run", "")
    assert find_remote("file:///data/x-{0..3}.tar") is None
    (tmp_path / "short").symlink_to(run)  # a run may itself be a link
    folder = RunFolder(tmp_path / "short")
    folder.lock()
    folder.unlock()
    assert folder.read_config()
    shutil.copytree(photos, tmp_path / "[a]" / "b")
    monkeypatch.chdir(tmp_path / "[a]")
    monkeypatch.setenv("HOME", str(tmp_path / "[a]"))
    for name in ("b/*", absolute_pattern("b/**"), f"{photos.parent}/**/*.*", absolute_pattern("b/0*")):
        assert not may_search_disc(name)
        assert open_stored(name, "a run", "").train.name == open_data(name).train.name
    assert may_search_disc(absolute_pattern("*/*")), "all of the user's home"


def test_braces_that_fill_memory_are_refused():
    for bomb in ("{a,b}" * 60, "{0..999999999999}", "{1..1000}{1..1000}{1..1000}", "{" * 3000 + "a,b" + "}" * 3000):
        with pytest.raises(PatchloomError, match="names|nested"):
            open_stored(f"{bomb}.tar", "a run", "")


@given(st.text(alphabet="{},.:pie/ x01", max_size=24))
@examples(max_examples=300)
def test_names_that_expand_to_a_command_are_found(name):
    """This includes random names, and names made by brace expansion."""
    try:
        words = expand_braces(name)
    except PatchloomError:
        return
    if any(part.strip().lower().startswith("pipe:") for word in words for part in word.split(",")):
        assert find_remote(name) is not None


# ---- cards

# values that no encoder's card has, by the path to their place
CARDS: dict[str, list[Any]] = {
    "spec": [None, "vit"],
    "spec.model": ["hf-hub:nobody/model", "hf_hub:a/b", "local-dir:/tmp", "../../vit_tiny_patch16_224", ["nano"]],
    "spec.options": [
        *({"checkpoint_path": "/tmp/evil.pth"}, {"pretrained": True}, {"pretrained_cfg": {"file": "/tmp/evil.pth"}}),
        *({"pretrained_cfg_overlay": {"url": "http://127.0.0.1/x"}}, {"cache_dir": "/tmp"}, {"device": "cuda:7"}),
        *({"model_name": "hf-hub:a/b"}, {"norm_layer": "os.system"}, {"x=print(1), depth": None}, {"scriptable": True}),
        *({"depth": {"x": 1}}, {"depth": "2"}, {"depth": -1}, {"depth": 10**9}, {"embed_dim": True}),
        *({"embed_dim": 10**9}, {"embed_dim": 65_536}, {"drop_path_rate": math.nan}, {"mlp_ratio": math.inf}),
    ],
    "spec.img_size": [[10**9, 10**9], ["16", "16"], [16, 16, 16], []],
    "spec.patch_size": ["4); import os", 0],
    "spec.channels": ["3", 2**40],
    "spec.positions": ["__import__('os')"],
    "mean": [["__import__('os').system('x')"] * 3, [[0.5]] * 3, [math.nan] * 3, [0.5]],
    "std": [[-1.0] * 3, [0.2, 0.0, 0.2]],
    "task": [["mae"]],
    "name": [{"a": 1}],
    "extra_modules": [{"../../x": "pooling"}, {"/etc/x": "pooling"}, {"instance_head": "exec"}],
    "sound": ["print(1)", {"low": "20), __import__('os').system('x')"}],
    "": [[]],
}


def changed(about: dict[str, Any], place: str, value: Any) -> None:
    """Set the value at the path ``a.b.c`` in nested dicts, or merge two dicts; empty the dict if the path is empty."""
    *above, last = place.split(".")
    for part in above:
        about = about[part]
    if not last:
        about.clear()
    elif isinstance(value, dict) and isinstance(about.get(last), dict):
        about[last] |= value
    else:
        about[last] = value


@pytest.mark.parametrize("place", CARDS)
def test_a_card_is_checked(place, encoder):
    whole = encoder.read_bytes()
    for value in CARDS[place]:
        encoder.write_bytes(whole)
        with_card(encoder, lambda about, value=value: changed(about, place, value))
        refusal(load_encoder_file, encoder)


def test_every_verb_refuses_a_forged_card_in_a_sentence(encoder, capsys):
    with_card(encoder, lambda about: changed(about, "spec.options", {"embed_dim": 65_536}))
    for words in (["export", encoder], ["look", encoder, "digits"], ["evaluate", "knn", encoder, "digits"]):
        failed(capsys, *words)


def test_a_card_that_is_whole_is_read_and_cannot_rule_the_terminal(encoder):
    with_card(encoder, lambda about: about.update(of_a_later_version=1, name="\x1b[2J\rx" + "y" * 10_000))
    card = load_encoder_file(encoder)[1]
    assert card.spec.model == "nano" and card.name.isprintable() and len(card.name) <= 500


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_of_weights_runs_nothing(encoder, tmp_path, capsys):
    """Neither as weights, nor as a ``checkpoint_path`` among a card's options, which timm would read."""
    evil = tmp_path / "evil.pth"
    torch.save({"state_dict": Evil(tmp_path / "touched")}, evil)
    failed(capsys, "evaluate", "knn", evil, "digits", "--model", "vit_tiny_patch16_224")
    with_card(encoder, lambda about: about["spec"]["options"].update(checkpoint_path=str(evil)))
    assert "checkpoint_path" in refusal(load_encoder_file, encoder)
    assert not (tmp_path / "touched").exists()


def test_a_few_bytes_are_not_a_large_tensor(tmp_path):
    name, state = "patch_embed.proj.weight", stock_encoder("vit_tiny_patch16_224").state_dict()
    state = {key: torch.zeros(value.shape) for key, value in state.items()}
    for tensor, word in (
        (torch.zeros(1, dtype=torch.float16).expand(2**24, 2**24), "does not store all numbers"),
        (torch.zeros(192, 3, 16, 16, device="meta"), "does not store all numbers"),
        (torch.zeros(192, 768).to_sparse(), "does not store all numbers"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "does not store all numbers"),
        (torch.zeros(192, 3, 0, 0), "192x3x0x0"),
    ):
        torch.save(state | {name: tensor}, path := tmp_path / "weights.pth")
        with pytest.raises(PatchloomError, match=word) as refused:
            patchloom.load_encoder(path, model="vit_tiny_patch16_224")
        assert name in str(refused.value)


def test_metadata_that_nests_without_end_is_left_out(tmp_path):
    save_file({"a": torch.zeros(1)}, path := tmp_path / "a.safetensors", {"format": "[" * 10**5})
    assert read_weights(path)["a"].shape == (1,)


def test_buffers_that_fill_memory_are_refused(tmp_path):
    options = SMALL | {"num_heads": 2}
    spec = EncoderSpec("vit_small_patch16_rope_224", (8192, 8192), 1, positions="rotary", options=options)
    vit = build_encoder(replace(spec, img_size=(16, 16)))
    save_encoder(vit, EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "a"), path := tmp_path / "encoder.safetensors")
    with pytest.raises(PatchloomError, match=r"is not what patchloom wrote \(its buffers need [\d.]+ GiB\)"):
        load_encoder_file(path)


SOUNDS: dict[str, Any] = {
    **{"low": "20), __import__('os').system('x')", "bands": "64); import os; (0", "bins": [40], "rate": 10**12},
    **{"seconds": math.inf, "window": math.nan, "hop": -1.0, "features": "exec", "std": {"a": 1}, "more": 1},
    "mean": ["__import__('os').system('x')"] * 40,
}


def test_the_sound_of_a_card_is_no_code():
    """Its values are written into the program that export makes."""
    plain = json.loads(json.dumps(asdict(Sound(mean=(0.0,) * 40, std=(1.0,) * 40))))
    assert sound_from(plain).size == (40, 98)
    for name, value in SOUNDS.items():
        with pytest.raises(ValueError):
            sound_from(plain | {name: value})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)) | st.text(max_size=12), ANYTHING, max_size=4))
@examples(max_examples=300)
def test_options_that_pass_are_plain(given_options):
    """Every accepted value is a number or a list of numbers within the range of its name."""
    try:
        check_model_options(given_options)
    except PatchloomError:
        return
    for name, value in given_options.items():
        _, low, high = OPTIONS[name]
        for one in value if isinstance(value, list | tuple) else [value]:
            assert one is None or (type(one) in (bool, int, float) and low <= one <= high)


@pytest.fixture(scope="module")
def self_describing(made, tmp_path_factory) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """A small file of each kind with metadata, and the function that reads it."""
    from patchloom.dense.checkpoint import DenseCard, save_dense
    from patchloom.dense.segmenter import Segmenter
    from patchloom.evaluate.classifier import Classifier, ClassifierCard, load_classifier, save_classifier
    from patchloom.nets.finetune import at_size

    folder = tmp_path_factory.mktemp("whole")
    vit, card = load_encoder_file(made / "encoder" / "e.safetensors")
    parts = {name: folder / f"{name}.safetensors" for name in ("classifier", "dense", "instance_head", "encoder")}
    save_encoder(vit, replace(card, extra_modules={"instance_head": "pooling"}), parts["encoder"])
    save_extra_module(InstanceHead(32, 4, 1), parts["instance_head"])
    trained = (("a", "b"), "d", "t", 0, {"lr": 0.1})
    save_classifier(Classifier(vit, 2, "mean"), ClassifierCard(card, "keep", "mean", *trained), parts["classifier"])
    model = Segmenter(at_size(vit, card, (16, 16), "keep"), 2, head="linear")
    save_dense(model, DenseCard("segment", card, "keep", (16, 16), 16, {"head": "linear"}, *trained), parts["dense"])
    hub = export(parts["encoder"], to="hf", out=folder / "hub").weights
    other = transformers_folder(folder / "other")
    return {
        "encoder": (parts["encoder"], lambda: load_encoder_file(parts["encoder"])),
        "classifier": (parts["classifier"], lambda: load_classifier(parts["classifier"])),
        "dense": (parts["dense"], lambda: load_dense(parts["dense"])),
        "module": (parts["instance_head"], lambda: patchloom.load_extra_module(parts["encoder"], "pooling")),
        "timm": (hub / "config.json", lambda: patchloom.load_encoder(hub)),
        "transformers": (other / "config.json", lambda: patchloom.load_encoder(other)),
        "preprocessor": (other / "preprocessor_config.json", lambda: patchloom.load_encoder(other)),
    }


def transformers_folder(folder: Path) -> Path:
    """Write a ViT with a configuration of transformers, and return its folder."""
    state = build_encoder(EncoderSpec("nano", (16, 16), 8, 3, "learned", SMALL | {"num_heads": 2})).state_dict()
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    config = {"model_type": "vit", "num_attention_heads": 2, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return folder


def places(about: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the paths to all values inside a nested plain value."""
    inside = about.items() if isinstance(about, dict) else enumerate(about) if isinstance(about, list) else ()
    return [above, *(place for name, value in inside for place in places(value, (*above, name)))]


def replaced(about: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    about = about.copy()
    about[place[0]] = replaced(about[place[0]], place[1:], value)
    return about


KINDS = ("encoder", "classifier", "dense", "module", "timm", "transformers", "preprocessor")
EXTREMES = st.sampled_from(
    [None, True, 0, -1, 2**16, 2**31, 2**64, 10**400, 1e308, math.nan, math.inf, "", "x", [], {}]
)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_metadata_is_read_or_rejected(kind, self_describing):
    """If any value in a card or a configuration is changed, the file is read, or rejected with a message."""
    path, read = self_describing[kind]
    read()
    before = path.read_bytes()

    @given(st.data(), ANYTHING | EXTREMES)
    @examples(max_examples=60)
    def any_value_anywhere(data: st.DataObject, value: Any) -> None:
        def forge(about: Any) -> Any:
            place = data.draw(st.sampled_from([one for one in places(about) if one and one != ("sha256",)]))
            return replaced(about, place, value)

        path.write_bytes(before)
        if path.suffix == ".json":
            path.write_text(json.dumps(forge(json.loads(before))))
        else:
            with_card(path, lambda about: about.update(forge(about)))
        try:
            read()
        except PatchloomError as refusal:
            assert "\n" not in str(refusal)

    try:
        any_value_anywhere()
    finally:
        path.write_bytes(before)


# ---- dense models, modules beside an encoder

DENSES: dict[str, list[Any]] = {
    "encoder.spec.options": [{"checkpoint_path": "/tmp/evil.pth"}],
    "encoder": [
        {"spec": None, "task": f"timm:{name}"}
        for name in ("hf-hub:nobody/model", "local-dir:/tmp", "resnet18", "vit_tiny_patch16_224.nobodys")
    ],
    "kind": ["exec"],
    "arguments": [{"encoder": "x"}, {"head_width": 10**9}, {"head_width": "512"}],
    "size": [[10**6, 10**6], [16]],
    "positions": [["keep"]],
    "classes": [[1, 2]],
    "seed": ["0"],
    "ids": [{"a": 1}, [0, -1], [0, 10**9], [0], [1, 1]],
}


def test_a_dense_models_card_is_checked(self_describing):
    path, read = self_describing["dense"]
    whole, card = path.read_bytes(), read()[1]
    assert (card.kind, card.ids) == ("segment", (0, 1))
    with_card(path, lambda about: about.update(classes=["a\x1b[2J", "b\nc"], data="\x1b[2J"))
    assert all(map(str.isprintable, (*read()[1].classes, read()[1].data)))
    for place, value in ((place, value) for place, values in DENSES.items() for value in values):
        path.write_bytes(whole)
        with_card(path, lambda about, place=place, value=value: changed(about, place, value))
        refusal(read)
    path.write_bytes(whole)


def test_a_module_beside_an_encoder_is_checked(self_describing):
    encoder, read = self_describing["encoder"][0], self_describing["module"][1]
    path = encoder.with_name("instance_head.safetensors")
    whole = path.read_bytes()
    assert read() is not None
    for sizes in ({"width": "32"}, {"width": 2**40}, {"depth": 10**9}, {"heads": 0}, {"norm": 1}, {"width": True}):
        path.write_bytes(whole)
        with_card(path, lambda about, sizes=sizes: about["sizes"].update(sizes))
        refusal(read)
    path.write_bytes(whole)


# ---- models by name and option

MODELS: tuple[dict[str, Any], ...] = (
    *({"checkpoint_path": "x.pth"}, {"pretrained": True}, {"pretrained_cfg": {}}, {"pretrained_cfg_overlay": {}}),
    *({"cache_dir": "/tmp"}, {"scriptable": True}, {"norm_layer": torch.nn.LayerNorm}, {"block_fn": print}),
    *({"embed_layer": "x"}, {"weight_init": "skip"}, {"depth": 2.5}, {"depth": math.nan}, {"qkv_bias": "yes"}),
)


def test_a_model_has_sizes_alone_in_python_too():
    for model in MODELS:
        with pytest.raises(PatchloomError, match=next(iter(model))):
            patchloom.pretrain("digits", model={"name": "nano", **model}, epochs=1)
        with pytest.raises(PatchloomError, match=next(iter(model))):
            build_encoder(EncoderSpec("nano", (16, 16), 4, options=model))
    known = {*signature(VisionTransformer).parameters, *signature(SwinTransformer).parameters}
    assert {*OPTIONS} <= known, "every plain option is one of timm's"


def test_a_model_is_a_name_alone(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *given, **named: pytest.fail("timm was asked"))
    names = ("hf-hub:a/b", "hf_hub:a/b", "local-dir:/tmp", "/tmp/x.pth", "vit_tiny_patch16_224\n", "timm/vit", "", "é")
    for name in names:
        for build in (
            lambda name=name: build_encoder(EncoderSpec(name, (16, 16), 4)),
            lambda name=name: stock_encoder(name),
            lambda name=name: format.load_encoder_file(f"timm:{name}"),
        ):
            with pytest.raises(PatchloomError):
                build()


# ---- settings of a run

SETTINGS: dict[str, Any] = {
    **{"img_size": "auto", "patch_size": [1, 2, 3], "channels": "3", "epochs": "1", "batch_size": -5, "seed": 1.5},
    **{"data": {"a": 1}, "task": "mae", "workers": 10**9, "precision": "exec", "nothing": 1},
}
FORGED_MODELS = (
    *({"name": "hf-hub:a/b"}, {"name": "nano", "checkpoint_path": "x"}, {"name": "nano", "depth": "1"}),
    {"name": "nano", "model_name": "local-dir:x"},
)


def test_the_settings_of_a_run_are_checked(run, capsys):
    whole = (run / "config.yaml").read_bytes()
    for values in (*({name: value} for name, value in SETTINGS.items()), *({"model": one} for one in FORGED_MODELS)):
        (run / "config.yaml").write_bytes(whole)
        forged(run, **values)
        assert "not a configuration" in refusal(RunFolder(run).read_config)
    look(capsys, run)


MEASURED = {"mean": [0.5] * 3, "std": [0.2] * 3, "height": 16, "width": 16, "sampled": 1, "fingerprint": "x"}
MEASURED |= {"held_out": [0], "held_out_copies": [], "held_out_doubt": "", "held_out_looked": True}


def test_what_was_measured_of_the_data_is_checked(run):
    write_checksummed(run / "data.yaml", MEASURED)
    assert RunFolder(run).read_stats().height == 16
    for found in ({"mean": "0.5"}, {"std": [[1]]}, {"height": "x"}, {"held_out": ["0"]}, {"sound": {"low": "x"}}):
        write_checksummed(run / "data.yaml", MEASURED | found)
        assert "not what patchloom wrote" in refusal(RunFolder(run).read_stats)


def test_yaml_repeats_nothing(tmp_path, run, capsys):
    twice = tmp_path / "twice.yaml"
    twice.write_text("epochs: 1\nseed: 1\nepochs: 2\n")
    assert "repeated key epochs" in failed(capsys, "pretrain", "digits", "--config", twice)
    twice.write_text("batch_size: 1\nbatch-size: 2\n")
    assert "twice" in failed(capsys, "pretrain", "digits", "--config", twice)
    twice.write_text("a: &a [x, x]\nb: &b [*a, *a]\ntask: {c: [*b, *b]}\n")
    assert "repeats" in failed(capsys, "pretrain", "digits", "--config", twice)
    twice.write_text("task: !!python/object/apply:os.system ['true']\n")
    assert "is not YAML" in failed(capsys, "pretrain", "digits", "--config", twice)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().partition("\n")[2] + "data: other\n")
    assert "repeated key data" in refusal(RunFolder(run).read_config)
    write_checksummed(twice, {"a": (one := [1, 2]), "b": one})  # which YAML would write as a name of the first
    assert read_checksummed(twice) == {"a": [1, 2], "b": [1, 2]}


def test_an_option_is_given_once():
    for words in (
        *("--epochs 1 --epochs 2", "--epochs=1 --epochs 1", "--batch-size 8 --batch_size 8", "--flip --flip=false"),
        *("--task mae --task.name lut", "--task.mask_ratio 0.5 --task.mask_ratio 0.6"),
    ):
        assert "twice" in refusal(parse_pretrain, ["digits", *words.split()])
    assert "twice" in refusal(parse_call, "evaluate", "knn run digits --seed 1 --seed 2".split())
    assert "twice" in refusal(parse_call, "look", "run --seed 1 --seed=2".split())


# ---- configurations

CONFIGS: tuple[dict[str, Any], ...] = (
    *({"data": "pipe:touch x"}, {"data": "{pi,x}pe:touch x"}, {"data": ["digits", "PIPE:x"]}, {"data": "http://h/x"}),
    *({"data": "hf:a/b"}, {"data": "cifar10"}, {"data": "digits", "init": "timm:vit_tiny_patch16_224"}),
    *({"data": "digits", "task": "evil.py:Evil"}, {"data": "digits", "task": {"name": "evil:Evil"}}),
    *({"data": "digits", "task.name": "evil.py"},),
    *({"data": "digits", "task": {"name": "distill", "features_of": "timm:vit_tiny_patch16_224"}},),
)


def test_a_configuration_runs_and_fetches_nothing(tmp_path, monkeypatch, capsys):
    """Nor if the attacker ships a folder of the name of a command or an address beside it."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('touched', 'w')")
    folders = ("pipe:touch touched", "pipe:touch touched/x", "hf:nobody", "http:/127.0.0.1/x.tar", "a::b")
    for name in folders:
        Path(name).mkdir(parents=True)
    for values in (*CONFIGS, *({"data": name.replace(":/", "://")} for name in folders)):
        Path("run.yaml").write_text(yaml.safe_dump(values))
        assert "on the command line, too" in failed(capsys, "pretrain", "--config", "run.yaml"), values
    assert not Path("touched").exists() and not Path("x").exists()


def test_what_is_typed_wins_over_a_configuration(tmp_path):
    (config := tmp_path / "run.yaml").write_text("data: pipe:touch x\ntask: evil.py:Evil\ninit: timm:vit_tiny\n")
    words = ["digits", "--task", "mae", "--init", "other.safetensors", "--config", str(config)]
    given, _ = parse_pretrain(words)
    assert (given["data"], given["task"]["name"], given["init"]) == ("digits", "mae", "other.safetensors")


# ---- tasks of one's own

SMALLEST = "--model nano --model.depth 1 --epochs 1 --batch_size 4 --img_size 16 --patch_size 4 --kernels torch".split()
EVIL = """
from pathlib import Path
Path(__file__).with_name("touched").touch()
from patchloom.tasks.mae import MAE
class Half(MAE):
    pass
"""


@pytest.fixture
def own(photos, tmp_path_factory) -> tuple[Path, Path]:
    """A run of a custom task, finished or not, and its file, as from an archive; none of its code has run here."""
    folder = tmp_path_factory.mktemp("own")
    (file := folder / "half.py").write_text(EVIL)
    model = {"name": "nano", **SMALL, "depth": 1}
    patchloom.pretrain(photos, f"{file}:Half", out=folder / "run", model=model, epochs=1, batch_size=8)
    (folder / "touched").unlink()
    forget()
    return folder / "run", file


def test_a_custom_task_of_a_run_is_run_only_if_it_is_typed(own, photos, tmp_path, capsys):
    run, file = own
    touched = file.with_name("touched")
    for state in ("finished", "unfinished"):
        if state == "unfinished":
            (run / "encoder.safetensors").unlink()
            (run / "summary.txt").unlink()
        assert f"--task {file}:Half" in failed(capsys, "look", run)
        assert f"--task {file}:Half" in failed(capsys, "evaluate", "positions", run, photos)
        # what needs the encoder alone has it
        assert main(["evaluate", "knn", str(run), "shapes:40", "--ks", "1"]) == 0
        assert main(["export", str(run), "--out", str(tmp_path / f"{state}.safetensors")]) == 0
        assert main(["report", str(run)]) == 0
        assert named_extra_module(run, "pooling") is None
        assert "--task" in failed(capsys, "pretrain", "--config", run / "config.yaml", "--out", tmp_path / "again")
        assert not touched.exists()
    assert main(["look", str(run), "--task", f"{file}:Half"]) == 0 and touched.exists()


NAMES = ("half.py:Half", "half.py", "{}/half.py:Half", "half:Half", "package.half:Half", "half.py:Half#", "./half.py:H")


def test_a_task_that_a_run_names_by_hand_is_not_run(run, photos, tmp_path, monkeypatch, capsys):
    """An attacker may name it as a user would, without the digest that patchloom stores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("package").mkdir()
    for file in ("half.py", "package/__init__.py", "package/half.py"):
        Path(file).write_text(EVIL)
    for name in NAMES:
        for digest in ("", "#0123456789abcdef"):
            forged(run, task={"name": name.format(tmp_path).rstrip("#") + digest})
            refusal(load_task, run)
    for digest in ("", "#0123456789abcdef"):
        forged(run, task={"name": f"half.py:Half{digest}"})
        look(capsys, run)
        # patchloom writes no name without a digest, so the configuration is rejected; else only the encoder is read
        assert main(["export", str(run)]) == (0 if digest else 2)
        # kernels are named, since a choice among them is measured
        failed(capsys, "pretrain", photos, "--task", "mae", "--kernels", "torch", "--out", run)
    assert not [*tmp_path.rglob("touched")]


def test_a_task_is_no_part_of_a_stored_comparison(tmp_path):
    asked = Compare("digits", tasks=("mae", "lut"), seeds=1, minutes=1.0)
    arm = {"batch": 8, "epochs": None, "seconds": 60.0}
    stored = {
        "asked": comparing.fixed_settings(asked),
        "arms": {"mae": arm, "lut": arm},
        "held_out": 1,
        "threads": 1,
        "notes": [],
    }
    write_checksummed(tmp_path / "compare.yaml", stored)
    assert [*comparing.stored_plan(asked, tmp_path).arms] == ["mae", "lut"]
    for wrong in (
        {"arms": {"mae": arm, "evil.py:Evil": arm}},
        {"arms": {"mae": arm, "lut": {**arm, "batch": "1 --task=evil.py"}}},
        {"arms": {"mae": arm, "lut": 1}},
        {"threads": "1 --task=evil.py"},
    ):
        write_checksummed(tmp_path / "compare.yaml", stored | wrong)
        assert "not the plan" in refusal(comparing.stored_plan, asked, tmp_path)


FAULTS = {  # a body of a task's class, and the line of its file that fails
    "built": ("    def __init__(self, encoder):\n        super().__init__(encoder)\n        {}['gone']", 5),
    "running": ("    def given(self, images, generator=None, **ratios):\n        return {}['gone']", 4),
    "leaving": ("    raise SystemExit('gone')", 3),
}


def test_an_error_in_a_custom_task_names_its_line(photos, tmp_path, capsys):
    for when, (body, line) in FAULTS.items():
        (file := tmp_path / f"{when}.py").write_text(f"from patchloom.tasks.mae import MAE\nclass Mine(MAE):\n{body}\n")
        words = ["pretrain", photos, "--task", f"{file}:Mine", "--out", tmp_path / when, *SMALLEST]
        assert main([*map(str, words)]) == 2
        said = capsys.readouterr().err  # without a traceback
        assert said.startswith("patchloom: ") and said.count("\n") == 1
        assert f"line {line}" in said and str(file) in said and "gone" in said


def test_a_teacher_that_a_run_names_is_not_fetched(run, monkeypatch):
    write_checksummed(run / "data.yaml", MEASURED)
    forged(run, task={"name": "distill", "features_of": "timm:vit_tiny_patch16_224"}, model={"name": "nano"})
    for place in ("socket.create_connection", "patchloom.system.network.why_unreachable"):
        monkeypatch.setattr(place, lambda *given, **named: pytest.fail("something is fetched"))
    assert "does not download" in refusal(load_task, run)


def test_an_unknown_setting_of_a_configuration_is_no_data(tmp_path, monkeypatch, capsys):
    """Argparse takes an unknown option with a space for a positional argument."""
    monkeypatch.chdir(tmp_path)
    for key in ("foo", "data ", "data+", "", "task.name ", "--data", "{a", "-data"):
        photographs(Path(f"--{key.replace('-', '_')}=a b"))
        Path("run.yaml").write_text(yaml.safe_dump({key: "a b,pipe:touch touched"}))
        assert "there is no option --" in failed(capsys, "pretrain", "--config", "run.yaml")
    assert "there is no option --foo" in failed(capsys, "look", "--foo=a b")
    assert not Path("touched").exists()


def test_a_pattern_finds_folders_and_no_names(tmp_path, monkeypatch):
    """All matches of a pattern are taken as folders, even if their names would mean something else when typed."""
    for name in ("hf:nobody", "cifar10", "shapes:10"):
        photographs(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for pattern, n in (("h*", 10), ("cif*", 10), ("shapes[:]*", 10), ("*", 30), ("{cifar10,hf:nobody}", 20)):
        assert len(open_data(pattern).train) == n
    assert len(open_stored("h*", "a run", "").train) == 10


def test_a_data_set_that_a_run_names_has_no_configuration_of_its_own(run, home, capsys, tmp_path):
    """The library datasets downloads the files that the card of a local folder names."""
    import datasets

    (stored := tmp_path / "stored").mkdir()
    pixels = [np.zeros((16, 16, 3), np.uint8)] * 4
    some = datasets.Dataset.from_dict({"image": pixels}, datasets.Features({"image": datasets.Image()}))
    some.to_parquet(stored / "x.parquet")
    assert len(open_stored(f"hf:{stored}", "a run", "").train) == 4
    forged(run, data=f"hf:{stored}")
    text = f"configs: [{{config_name: default, data_files: [{{split: train, path: '{home}/x.parquet'}}]}}]"
    for file, content in (("README.md", f"---\n{text}\n---\n"), (".huggingface.yaml", text), ("stored.py", text)):
        (stored / file).write_text(content)
        assert "type" in look(capsys, run)
        (stored / file).unlink()


def test_a_teacher_from_an_address_is_not_fetched(monkeypatch):
    """timm has a URL instead of a repository on the Hub for some models, so the Hub's cache does not know them."""
    name, create, asked = "vit_huge_patch14_gap_224.in1k_ijepa", timm.create_model, []
    assert not timm.models.get_pretrained_cfg(name).hf_hub_id

    def only_sizes(name: str, pretrained: bool = False, **named: Any) -> Any:
        asked.append(pretrained)
        assert not pretrained, "something is fetched"
        return create(name, **named)

    monkeypatch.setattr(timm, "create_model", only_sizes)
    with network.from_cache_alone(True, "a run names it"), pytest.raises(PatchloomError, match="a run names it"):
        load_encoder_file(f"timm:{name}")
    assert asked == [False]


EPS = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_is_no_image(tmp_path, monkeypatch, run):
    """Pillow detects formats by their content, and runs Ghostscript for PostScript files, which are programs."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **named: pytest.fail("a program is run"))
    for suffix in (".png", ".jpg", ".tif", ".bmp", ".gif"):
        file = tmp_path / f"x{suffix}"
        file.write_text(EPS)
        with pytest.raises(Unreadable):
            read_image(file)
        with pytest.raises(Unreadable):
            decode_image(file.read_bytes(), "x")
    (run / "pictures").mkdir(exist_ok=True)
    (run / "pictures/x.png").write_text(EPS)
    assert "x.png" in collect_pictures([load_run(run)])[1][0]


def test_nothing_is_written_through_a_link_of_a_run_or_a_comparison(run, tmp_path):
    """An archive may contain links, which would redirect writes to a file of the user."""
    (other := tmp_path / "bashrc").write_text("theirs\n")
    for name in ("log.txt", ".lock", "skipped.txt"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(other)
        folder = RunFolder(run)
        with pytest.raises(PatchloomError, match="link"):
            folder.lock()
            append(folder.log, "touch x\n")
            folder.note_skipped("touch x")
        folder.unlock()
        (run / name).unlink()
    job = runner.Job("mae", 0, tmp_path / "run", ["--version"], runner.Length(8, 1.0, 1.0))
    job.log.parent.mkdir(exist_ok=True)
    job.log.symlink_to(other)
    assert "link" in refusal(runner._start, job, 0, ())
    assert other.read_text() == "theirs\n"


# ---- links, pipes and devices


def test_links_of_a_run_are_neither_followed_nor_copied(run, tmp_path, ends):
    """This is so when the run is trained longer, which copies its end."""
    (secret := tmp_path / "id").write_text("secret")
    (run / "pictures").mkdir(exist_ok=True)
    for name, to in (("id", secret), ("big.safetensors", "/dev/zero"), ("pictures/id.png", secret)):
        (run / name).symlink_to(to)
    os.mkfifo(run / "pipe")
    (run / "own.txt").write_text("kept")
    folder = RunFolder(run)
    folder.keep_end(1)
    end = folder.kept_end(1)
    copied = {path.name for path in end.rglob("*") if not path.is_dir()}
    assert {"own.txt", "encoder.safetensors", "summary.txt"} <= copied
    assert not copied & {"id", "big.safetensors", "id.png", "pipe"}
    assert secret.read_text() == "secret" and not [path for path in end.rglob("*") if path.is_symlink()]


def test_a_full_disc_while_a_run_is_extended_is_temporary_and_leaves_nothing(run, monkeypatch):
    """The copy of its end would keep the disc full."""

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(run.rglob("*"))
    with monkeypatch.context() as patch, pytest.raises(TemporaryError, match="No space left") as caught:
        patch.setattr(shutil, "copyfileobj", full)
        RunFolder(run).keep_end(1)
    assert caught.value.exit_code == 75
    assert sorted(path for path in run.rglob("*") if path != run / "earlier") == before
    RunFolder(run).keep_end(1)
    assert (RunFolder(run).kept_end(1) / "summary.txt").exists()


def test_a_linked_folder_of_a_run_is_refused(run, tmp_path, capsys):
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / ".bashrc.4711").touch()
    for name in ("pictures/deeper", "checkpoints", "earlier", store.FOLDER):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(theirs)
        for words in (["look", run], ["report", run], ["evaluate", "knn", run, "digits"]):
            assert "link" in failed(capsys, *words)
        assert "link" in refusal(RunFolder(run).lock)
        (run / name).unlink()
    assert [path.name for path in theirs.iterdir()] == [".bashrc.4711"]


# in groups: what a missing configuration hides is tried with it
RUN_FILES = (
    ("config.yaml",),
    ("requested.yaml", "reasons.yaml", "data.yaml", "verdict.yaml", "trained_on.bin", "metrics.csv", "log.txt"),
    ("skipped.txt", "unreadable.txt", "summary.txt", store.FILE, "pictures/x.png", "pictures/segment/pairs.json"),
    ("encoder.safetensors", ".lock", "start.safetensors", "checkpoints/last.safetensors"),
)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("names", RUN_FILES, ids=lambda names: names[0])
def test_only_regular_files_of_a_run_are_opened(names, kind, run, capsys, ends):
    forged(run)
    for name in names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(kind)
    evaluate = ["evaluate", "knn", run, "shapes:40", "--ks", "1"]
    for words in (["report", run], evaluate, ["look", "curves", run, run], ["export", run]):
        assert main([str(word) for word in words]) in (0, 2)
        assert "unexpected" not in capsys.readouterr().err
    folder = RunFolder(run)
    for write in (
        folder.lock,
        lambda: folder.note_skipped("a line"),
        lambda: folder.note_unreadable(["a name"]),
        lambda: append(folder.log, "a line"),
    ):
        with contextlib.suppress(PatchloomError):
            write()
    folder.unlock()


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_only_regular_files_configure_or_label(kind, tmp_path, encoder, photos, capsys, ends):
    path = tmp_path / "x.yaml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(kind)
    assert "regular file" in failed(capsys, "pretrain", "--config", path)
    shutil.copytree(photos, tmp_path / "yolo" / "images")
    (tmp_path / "yolo" / "data.yaml").write_text(f"train: {path}\nval: images\nnames: [a]\n")
    failed(capsys, "evaluate", "detect", encoder, tmp_path / "yolo" / "data.yaml")
    shutil.copytree(photos, tmp_path / "maps" / "images")
    (tmp_path / "maps" / "masks").mkdir()
    for file in photos.iterdir():
        (tmp_path / "maps" / "masks" / f"{file.stem}.png").symlink_to(path)
    failed(capsys, "evaluate", "segment", encoder, tmp_path / "maps")


WIDE_NAMES = ("/**/*.png", "/*/*/*/..//*/*", "~/../**", "/**", "/", "/proc/*/*", "hf:/", "file:///*/*/x.tar", "{/**,x}")


def test_a_disc_is_searched_only_if_that_is_typed(run, tmp_path, capsys, ends):
    for name in WIDE_NAMES:
        assert "type" in refusal(open_stored, name, "a run", "")
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({"data": name}))
        assert "on the command line" in failed(capsys, "pretrain", "--config", tmp_path / "x.yaml")
    assert "type" in look(capsys, forged(run, data="/**"))
    assert images_of(load_run(run)).shown is None


def test_links_do_not_widen_the_pattern_of_a_run(run, tmp_path, capsys, monkeypatch, ends):
    (tmp_path / "own" / "deep").mkdir(parents=True)
    (tmp_path / "own" / "disc").symlink_to("/")
    assert "type" in look(capsys, forged(run, data=f"{tmp_path}/own/disc/**/*.png"))
    monkeypatch.setattr("patchloom.data.sources.glob._MOST_FOLDERS", 50)
    for name in ("one", "two"):
        (tmp_path / "own" / name).symlink_to(tmp_path / "own" / "deep" / "..")
    (tmp_path / "own" / "disc").unlink()
    assert "type" in look(capsys, forged(run, data=f"{tmp_path}/own/*/*/*/*/*/*/*/*.png"))


# ---- names that would command the terminal

HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202e\nforged"  # a title, a colour, reversed text, and a line
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> Path:
    """A folder with data, lists, a run and an encoder whose names, classes and settings hold control characters."""
    home = tmp_path_factory.mktemp("evil") / HOSTILE
    for folder in (home / "data" / part / f"{HOSTILE}{name}" for part in ("train", "test") for name in ("x", "y")):
        for path in photographs(folder).iterdir():
            path.rename(path.with_name(f"{HOSTILE}{path.name}"))
        (folder / f"{HOSTILE}.png").write_bytes(b"broken")
    images = home / "data" / "train" / f"{HOSTILE}x"
    run = a_run(home / HOSTILE, images)
    (run / "summary.txt").write_text(f"{HOSTILE}\n")
    (run / "reasons.yaml").write_text(yaml.safe_dump({HOSTILE: HOSTILE}))
    with_card(an_encoder(home / "encoder", images), lambda card: card | {"name": HOSTILE, "task": HOSTILE})
    save_file({HOSTILE: torch.zeros(2)}, home / "foreign.safetensors")
    with open(home / "table.csv", "w", newline="") as file:
        rows = ([f"data/train/{HOSTILE}x/{HOSTILE}{i}.png", f"{HOSTILE}{i % 2}", HOSTILE] for i in (0, 2, 4, 6, 8))
        csv.writer(file).writerows([["file", "label", HOSTILE], *rows])
    (home / "config.yaml").write_text(yaml.safe_dump({"data": str(home / "data"), "task.name": HOSTILE}))
    (home / "empty").mkdir()
    with tarfile.open(home / "shards.tar", "w") as tar:
        tar.add(images / f"{HOSTILE}0.png", f"{HOSTILE}.png")
    return home


PRINTING = (  # with @ for the hostile name
    *("check data", "check table.csv", "check shards.tar", "check empty", "pretrain --config config.yaml"),
    f"pretrain data --task mae --out @new {' '.join(SMALLEST)}",
    f"pretrain data --task mae --out @ {' '.join(SMALLEST)}",
    *("pretrain data --task @", "evaluate knn @ data --ks 1", "evaluate linear encoder/e.safetensors data"),
    *("evaluate segment @ data", "compare data --tasks mae,lut --minutes 1 --dry-run", "predict @ data"),
    *("embed @ data --to @.npz --near data/test/@x/@2.png", "look @ data --what features", "look curves @ @"),
    *("report @", "results @", "export @ --out @.safetensors", "export foreign.safetensors", "bench data --tasks @"),
    *("curate encoder/e.safetensors data --out @", "curate @ data"),
    *("distill encoder/e.safetensors data --student @", "tasks @", "recipes @", "@", "pretrain --task @ --help"),
)


@pytest.mark.parametrize("command", PRINTING)
def test_no_name_commands_the_terminal(command, evil, monkeypatch, capfd):
    """Neither the escape sequences nor the line breaks of names are printed, and JSON escapes them."""
    monkeypatch.chdir(evil)
    words = [word.replace("@", HOSTILE) for word in command.split()]
    assert main(words) in (0, 2)
    printed = "".join(capfd.readouterr())
    assert not CONTROL.search(printed), CONTROL.search(printed)
    assert printed and not re.search("^forged", printed, re.MULTILINE), printed
    if command.partition(" ")[0] in ("check", "report", "look", "export", "@"):
        main([*words, "--json"])
        assert not CONTROL.search(capfd.readouterr().out)


def test_only_the_last_printers_print_and_every_verb_is_tried():
    """All others would need to escape names: see `patchloom.display.visible`."""
    assert {command.partition(" ")[0] for command in PRINTING} >= {*VERBS}
    package = Path(patchloom.__file__).parent
    own = {"display.py", "cli.py", "train/metrics.py"}
    for path in package.rglob("*.py"):
        if str(path.relative_to(package)) not in own:
            assert not re.search(r"(?<![\w.])print\(|sys\.std(out|err)\.write", path.read_text("utf-8")), path


def test_an_error_message_has_an_end(capsys):
    said = failed(capsys, "pretrain", "x" * 10**6 + "/y")
    assert len(said) < 5000 and "y does not exist" in said or "…" in said
