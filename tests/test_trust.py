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
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from exporting import SMALL, a_run, an_encoder, photographs, with_card
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import save_file

import patchloom
from patchloom.audio.config import GREY, SIXTH, Sound, sound_from
from patchloom.cli import main
from patchloom.compare import plan as comparing
from patchloom.compare import runner
from patchloom.data.decode import Unreadable, decode_image, read_image
from patchloom.data.sources.glob import absolute_pattern, may_search_disc
from patchloom.data.sources.open import open_data, open_stored
from patchloom.data.sources.urls import expand_braces, find_remote
from patchloom.dense.checkpoint import DENSE_FORMAT as DENSE
from patchloom.dense.checkpoint import load_dense
from patchloom.errors import PatchloomError, TemporaryError, typed_fields
from patchloom.export.export import export
from patchloom.nets.build import OPTIONS, EncoderSpec, build_encoder, check_model_options
from patchloom.nets.checkpoints import format
from patchloom.nets.checkpoints.format import (
    EncoderCard,
    card_from,
    is_encoder_file,
    load_encoder_file,
    load_module_file,
    read_weights,
    save_encoder,
    save_extra_module,
    save_net,
    stock_encoder,
)
from patchloom.nets.checkpoints.load import Weights, kind_of
from patchloom.nets.heads import InstanceHead
from patchloom.options import VERBS, parse_call, parse_evaluate, parse_pretrain
from patchloom.report.load_run import load_run
from patchloom.report.pictures import collect_pictures, images_of
from patchloom.runs.checksummed import read_checksummed, write_checksummed
from patchloom.runs.encoder import named_extra_module
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import request
from patchloom.runs.task import load_task
from patchloom.system import network
from patchloom.system.files import append
from patchloom.tasks import custom, task_class

WIDE = 2**40


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
    """Reset the state to that of a process that has not loaded any class."""
    monkeypatch.setattr(custom, "_HERE", {})
    if hasattr(custom, "_TYPED"):
        monkeypatch.setattr(custom, "_TYPED", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("patchloom_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def server():
    """A web address on this machine, and the paths that were requested from it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    serving = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", asked
    serving.shutdown()
    thread.join()
    serving.server_close()


def forged(run: Path, **values: Any) -> Path:
    """Change the settings of a run, with the checksums of patchloom, and return the run."""
    for name in ("config.yaml", "requested.yaml"):
        path = run / name
        before = read_checksummed(path) if path.exists() else read_checksummed(run / "config.yaml")
        write_checksummed(path, before | values)
    return run


def failed(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("patchloom: ") and "Traceback" not in said and "unexpected" not in said, said
    return said


def look(capsys, run: Path) -> str:
    """Return the error message of ``look`` on the run's own images."""
    return failed(capsys, "look", run, "--what", "features")


# ---- data: commands and addresses

COMMANDS = {  # what touches {}, by how it is hidden
    "plain": "pipe:touch {}",
    "braces": "{{pipe:touch {} ;echo ,pipe:true ;#}}.tar",
    "nested": "{{{{pipe:touch {},x}},y}}.tar",
    "letters": "{{pi,po}}pe:touch {}.tar",
    "colon": "pipe{{:touch {},x}}.tar",
    "braces at the end": "pipe:touch {}{{,x}}",
    "number": "pipe:touch {}{{0..1}}.tar",
    "after a comma": "shapes:10,pipe:touch {}",
    "after a comma and a blank": "a.tar, pipe:touch {}",
    "upper case": "PIPE:touch {}",
    "mixed case": "PiPe:touch {}.tar",
    "blanks before": "  pipe:touch {}",
    "braces within a list": "a.tar,{{b,pipe:touch {}}}.tar",
    "behind an address": "file:///x::pipe:touch {}",
    "a path": "x/../pipe:touch {}.tar",
}


@pytest.mark.parametrize("hidden", COMMANDS)
@pytest.mark.parametrize("several", [False, True], ids=["one", "a list"])
def test_no_command_of_a_run_is_run(hidden, several, run, tmp_path, capsys):
    touched = tmp_path / "touched"
    name = COMMANDS[hidden].format(touched)
    forged(run, data=["shapes:10", name] if several else name)
    assert find_remote(name) is not None
    look(capsys, run)
    images_of(load_run(run))
    assert "Compared on noise" in export(run).notes[0]
    assert not [*tmp_path.glob("touched*")]


def test_a_command_that_is_typed_is_run(photos, tmp_path):
    with pytest.raises(PatchloomError, match="not a tar file|truncated"):
        open_data(f"{{pipe:touch {tmp_path}/touched;echo ,pipe:true ;#}}.tar")
    assert (tmp_path / "touched").exists()


ADDRESSES = (
    *("{}/x.tar", "{}/x-{{0..2}}.tar", "simplecache::{}/x.tar", "filecache::{}/x.tar", "blockcache::{}/x.tar"),
    *("zip://x.tar::{}/x.zip", "{{{},a}}/x.tar", "a.tar,{}/x.tar", " {}/x.tar", "reference://::{}/x.json"),
    *("tar://x::{}/a.tar", "file:///a.tar::{}/a.tar", "file:///a/../{}/b.tar"),
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_address_of_a_run_is_opened(address, run, server, capsys):
    home, asked = server
    before = len(asked)
    forged(run, data=address.format(home))
    said = look(capsys, run)
    assert "type" in said
    images_of(load_run(run))
    assert "Compared on noise" in export(run).notes[0]
    assert len(asked) == before


@pytest.mark.parametrize(
    "name",
    [
        *("s3://bucket/x.tar", "gs://b/x.tar", "hf://datasets/a/b.tar", "github://o:r@m/x", "ftp://h/x", "memory://x"),
        *("hf:nobody/nothing", "hf:nobody/nothing@config", "cifar10", "food101@/nowhere", "HTTP://h/x.tar"),
    ],
)
def test_nothing_is_fetched_for_a_run(name, run, capsys, monkeypatch):
    def download(*given: Any, **named: Any) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download)
    monkeypatch.setattr("torchvision.datasets.utils.urllib.request.urlopen", download)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", download)
    monkeypatch.setattr("torchvision.datasets.food101.download_and_extract_archive", download)
    monkeypatch.setattr("datasets.load_dataset", download)
    monkeypatch.setattr("patchloom.data.sources.urls.url_to_fs", download)
    assert "type" in look(capsys, forged(run, data=name))


def test_what_is_here_is_still_found(run, photos, tmp_path):
    measured = {"mean": [0.5] * 3, "std": [0.2] * 3, "height": 16, "width": 16, "sampled": 1, "fingerprint": "x"}
    write_checksummed(run / "data.yaml", measured)
    assert patchloom.look(run, what="features")  # its folder of images
    for name in (f"{photos}/*.png", f"{photos}/{{0,2}}.png", f"{photos}/0.png,{photos}/2.png", "shapes:10", "digits"):
        assert find_remote(name) is None and open_stored(name, "a run", "")
    assert find_remote("file:///data/x-{0..3}.tar") is None


BOMBS = ("{a,b}" * 60, "{0..999999999999}", "{1..1000}{1..1000}{1..1000}", "{" * 3000 + "a,b" + "}" * 3000)


@pytest.mark.parametrize("bomb", BOMBS, ids=["pairs", "range", "ranges", "nested"])
def test_braces_that_fill_memory_are_refused(bomb, run, capsys):
    with pytest.raises(PatchloomError, match="names|nested"):
        expand_braces(bomb)
    look(capsys, forged(run, data=f"{bomb}.tar"))


@given(st.text(alphabet="{},.:pie/ x01", max_size=24))
@examples(max_examples=300, deadline=None)
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
CARDS: dict[str, tuple[str, Any]] = {
    "a checkpoint": ("spec.options.checkpoint_path", "/tmp/evil.pth"),
    "pretrained": ("spec.options.pretrained", True),
    "a configuration": ("spec.options.pretrained_cfg", {"file": "/tmp/evil.pth"}),
    "an overlay": ("spec.options.pretrained_cfg_overlay", {"url": "http://127.0.0.1/x"}),
    "a cache": ("spec.options.cache_dir", "/tmp"),
    "another name": ("spec.options.model_name", "hf-hub:nobody/model"),
    "code for a norm": ("spec.options.norm_layer", "os.system"),
    "a keyword that is code": ("spec.options.x=print(1), depth", None),
    "scriptable": ("spec.options.scriptable", True),
    "a device": ("spec.options.device", "cuda:7"),
    "a hub name": ("spec.model", "hf-hub:nobody/model"),
    "another spelling of it": ("spec.model", "hf_hub:nobody/model"),
    "a folder": ("spec.model", "local-dir:/tmp"),
    "a path": ("spec.model", "../../vit_tiny_patch16_224"),
    "no text": ("spec.model", ["vit_tiny_patch16_224"]),
    "a dict for a depth": ("spec.options.depth", {"x": 1}),
    "text for a depth": ("spec.options.depth", "2"),
    "true for a width": ("spec.options.embed_dim", True),
    "a negative depth": ("spec.options.depth", -1),
    "a depth of 10^9": ("spec.options.depth", 10**9),
    "a width of 10^9": ("spec.options.embed_dim", 10**9),
    "a width that fills memory": ("spec.options.embed_dim", 65_536),
    "nan": ("spec.options.drop_path_rate", math.nan),
    "infinity": ("spec.options.mlp_ratio", math.inf),
    "a side of 10^9": ("spec.img_size", [10**9, 10**9]),
    "sides of text": ("spec.img_size", ["16", "16"]),
    "three sides": ("spec.img_size", [16, 16, 16]),
    "no side": ("spec.img_size", []),
    "a patch of text": ("spec.patch_size", "4); import os"),
    "no patch": ("spec.patch_size", 0),
    "channels of text": ("spec.channels", "3"),
    "channels without end": ("spec.channels", 2**40),
    "positions of text": ("spec.positions", "__import__('os')"),
    "a mean of text": ("mean", ["__import__('os').system('x')"] * 3),
    "a mean of lists": ("mean", [[0.5]] * 3),
    "a mean of nan": ("mean", [math.nan] * 3),
    "a mean of one": ("mean", [0.5]),
    "a negative deviation": ("std", [-1.0] * 3),
    "a task that is no text": ("task", ["mae"]),
    "a name that is no text": ("name", {"a": 1}),
    "a module above": ("extra_modules", {"../../x": "pooling"}),
    "an absolute module": ("extra_modules", {"/etc/x": "pooling"}),
    "a module for nothing": ("extra_modules", {"instance_head": "exec"}),
    "sound of text": ("sound", "print(1)"),
    "no card": ("", []),
    "no sizes": ("spec", None),
    "sizes of text": ("spec", "vit"),
}


def changed(about: dict[str, Any], place: str, value: Any) -> None:
    """Set the value at the path ``a.b.c`` in nested dicts; empty the innermost dict if the path ends with a dot."""
    *above, last = place.split(".")
    for part in above:
        about = about[part]
    if last:
        about[last] = value
    else:
        about.clear()


@pytest.mark.parametrize("forgery", CARDS)
def test_a_card_is_checked(forgery, encoder, capsys, tmp_path):
    path = with_card(encoder, lambda about: changed(about, *CARDS[forgery]))
    with pytest.raises(PatchloomError):
        load_encoder_file(path)
    failed(capsys, "export", path)
    failed(capsys, "look", path, "digits")


def test_a_card_that_is_whole_is_read(encoder):
    with_card(encoder, lambda about: about.update(of_a_later_version=1))
    assert load_encoder_file(encoder)[1].spec.model == "nano"


def test_a_card_cannot_rule_the_terminal(encoder):
    with_card(encoder, lambda about: about.update(name="\x1b[2J\rx" + "y" * 10_000))
    name = load_encoder_file(encoder)[1].name
    assert name.isprintable() and len(name) <= 500


def test_a_pickle_named_by_a_card_is_not_read(encoder, tmp_path):
    """A ``checkpoint_path`` among the options would have timm read a file that the card names."""
    evil = tmp_path / "evil.pth"
    torch.save(Evil(tmp_path / "touched"), evil)
    with_card(encoder, lambda about: about["spec"]["options"].update(checkpoint_path=str(evil)))
    with pytest.raises(PatchloomError, match="checkpoint_path"):
        load_encoder_file(encoder)
    assert not (tmp_path / "touched").exists()


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_of_weights_runs_nothing(tmp_path, capsys):
    evil = tmp_path / "evil.pth"
    torch.save({"state_dict": Evil(tmp_path / "touched")}, evil)
    failed(capsys, "evaluate", "knn", evil, "digits", "--model", "vit_tiny_patch16_224")
    assert not (tmp_path / "touched").exists()


UNSTORED = {
    "repeated": lambda: torch.zeros(1, dtype=torch.float16).expand(2**24, 2**24),
    "meta": lambda: torch.zeros(192, 3, 16, 16, device="meta"),
    "sparse": lambda: torch.zeros(192, 768).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
}


@pytest.mark.parametrize("kind", UNSTORED)
@pytest.mark.parametrize("name", ["patch_embed.proj.weight", "blocks.0.norm1.weight"])
def test_a_few_bytes_are_not_a_large_tensor(kind, name, tmp_path, capsys):
    state = stock_encoder("vit_tiny_patch16_224").state_dict()
    state = {key: torch.zeros(value.shape) for key, value in state.items()} | {name: UNSTORED[kind]()}
    torch.save(state, path := tmp_path / "weights.pth")
    assert f"does not store all numbers of '{name}'" in failed(
        capsys, "evaluate", "knn", path, "digits", "--model", "vit_tiny_patch16_224"
    )


def test_a_projection_of_no_pixels_is_refused(tmp_path, capsys):
    state = stock_encoder("vit_tiny_patch16_224").state_dict()
    state = {key: torch.zeros(value.shape) for key, value in state.items()}
    torch.save(state | {"patch_embed.proj.weight": torch.zeros(192, 3, 0, 0)}, path := tmp_path / "weights.pth")
    said = failed(capsys, "evaluate", "knn", path, "digits", "--model", "vit_tiny_patch16_224")
    assert "patch_embed.proj.weight is 192x3x0x0 there" in said


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


def test_an_encoder_file_is_one_by_any_name(encoder, tmp_path):
    path = tmp_path / "E.SAFETENSORS"
    path.write_bytes(encoder.read_bytes())
    assert is_encoder_file(path) and kind_of(path) == "patchloom" and Weights(path).license == ""


SOUNDS: dict[str, Any] = {
    "low": "20), __import__('pathlib').Path('{}').touch(",
    "bands": "64); __import__('pathlib').Path('{}').touch(); (0",
    "bins": [40],
    "rate": 10**12,
    "seconds": math.inf,
    "window": math.nan,
    "hop": -1.0,
    "features": "exec",
    "mean": ["__import__('pathlib').Path('{}').touch()"] * 40,
    "std": {"a": 1},
    "more": 1,
}


@pytest.mark.parametrize("name", SOUNDS)
def test_the_sound_of_a_card_is_no_code(name, tmp_path):
    touched = tmp_path / "touched"
    sound = Sound(mean=(0.0,) * 40, std=(1.0,) * 40)
    spec = EncoderSpec("nano", sound.size, (40, 1), 1, options=SMALL)
    path = tmp_path / "e.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, (GREY,), (SIXTH,), "mae", "e", sound=sound), path)
    assert export(path).difference < 1e-4
    value = json.loads(json.dumps(SOUNDS[name]).replace("{}", str(touched)))
    with_card(path, lambda about: about["sound"].update({name: value}))
    with pytest.raises(PatchloomError, match="not what patchloom wrote"):
        export(path)
    assert not touched.exists()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)) | st.text(max_size=12), ANYTHING, max_size=4))
@examples(max_examples=300, deadline=None)
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


@given(st.fixed_dictionaries({}, optional={name: ANYTHING for name in (*Sound.__dataclass_fields__, "other")}))
@examples(max_examples=300, deadline=None)
def test_sounds_that_pass_are_plain(plain):
    try:
        sound = sound_from(plain)
    except ValueError:
        return
    for value in (sound.rate, sound.seconds, sound.bins, sound.bands, sound.window, sound.hop, sound.low):
        assert type(value) in (int, float) and math.isfinite(value)


@given(st.sampled_from(["spec", "mean", "std", "task", "name", "extra_modules", "note", "sound"]), ANYTHING)
@examples(max_examples=150, deadline=None)
def test_any_value_in_a_card_is_read_or_refused(name, value):
    spec = {"model": "nano", "img_size": [16, 16], "patch_size": 4, "channels": 3, "positions": "sincos", "options": {}}
    card = {"spec": spec, "mean": [0.5] * 3, "std": [0.2] * 3, "task": "mae", "name": "e"}
    try:
        card_from(card | {name: value})
    except ValueError:
        pass


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
        "module": (parts["instance_head"], lambda: load_module_file(parts["encoder"], "pooling")),
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
    @examples(max_examples=60, deadline=None)
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


def test_what_typed_fields_takes():
    plain = {"rate": 16_000, "mean": [0.0] * 40}
    assert typed_fields(Sound, plain)["mean"] == (0.0,) * 40
    for wrong in ({"rate": "1"}, {"rate": True}, {"rate": math.nan}, {"nothing": 1}, [1], None):
        with pytest.raises(ValueError):
            typed_fields(Sound, wrong)


# ---- dense models, modules beside an encoder

DENSES: dict[str, tuple[str, Any]] = {
    "a checkpoint": ("encoder.spec.options.checkpoint_path", "/tmp/evil.pth"),
    "a hub name": ("encoder", {"spec": None, "task": "timm:hf-hub:nobody/model"}),
    "a folder": ("encoder", {"spec": None, "task": "timm:local-dir:/tmp"}),
    "no net of ours": ("encoder", {"spec": None, "task": "timm:resnet18"}),
    "an unknown tag": ("encoder", {"spec": None, "task": "timm:vit_tiny_patch16_224.nobodys"}),
    "a large stock": ("encoder", {"spec": None, "task": "timm:vit_giant_patch14_224"}),
    "another kind": ("kind", "exec"),
    "an argument": ("arguments.encoder", "x"),
    "a width": ("arguments.head_width", 10**9),
    "a width of text": ("arguments.head_width", "512"),
    "a size": ("size", [10**6, 10**6]),
    "one side": ("size", [16]),
    "positions": ("positions", ["keep"]),
    "classes": ("classes", [1, 2]),
    "a seed": ("seed", "0"),
    "ids": ("ids", {"a": 1}),
    "a negative id": ("ids", [0, -1]),
    "an id of 10^9": ("ids", [0, 10**9]),
    "too few ids": ("ids", [0]),
    "an id twice": ("ids", [1, 1]),
}


@pytest.mark.parametrize("forgery", DENSES)
def test_a_dense_models_card_is_checked(forgery, encoder, tmp_path):
    from patchloom.dense.checkpoint import DenseCard, save_dense
    from patchloom.dense.segmenter import Segmenter
    from patchloom.nets.finetune import at_size

    vit, card = load_encoder_file(encoder)
    arguments = {"head": "linear"}
    model = Segmenter(at_size(vit, card, (16, 16), "keep"), 2, **arguments)
    path = tmp_path / "model.safetensors"
    save_dense(model, DenseCard("segment", card, "keep", (16, 16), 16, arguments, ("a", "b"), "d", "t", 0, {}), path)
    assert (load_dense(path)[1].kind, load_dense(path)[1].ids) == ("segment", (0, 1))
    with_card(path, lambda about: about.update(classes=["a\x1b[2J", "b\nc"], data="\x1b[2J"))
    assert all(map(str.isprintable, (*load_dense(path)[1].classes, load_dense(path)[1].data)))

    def forge(about: dict[str, Any]) -> None:
        place, value = DENSES[forgery]
        changed(about, place, about["encoder"] | value if place == "encoder" else value)

    with_card(path, forge)
    with pytest.raises(PatchloomError):
        load_dense(path)


@pytest.mark.parametrize(
    "sizes", [{"width": "32"}, {"width": WIDE}, {"depth": 10**9}, {"heads": 0}, {"norm": 1}, {"width": True}]
)
def test_a_module_beside_an_encoder_is_checked(sizes, photos, tmp_path):
    vit, card = load_encoder_file(an_encoder(tmp_path / "x", photos))
    path = tmp_path / "encoder.safetensors"
    save_encoder(vit, replace(card, extra_modules={"instance_head": "pooling"}), path)
    save_extra_module(InstanceHead(32, 4, 1), tmp_path / "instance_head.safetensors")
    assert load_module_file(path, "pooling") is not None
    with_card(tmp_path / "instance_head.safetensors", lambda about: about["sizes"].update(sizes))
    with pytest.raises(PatchloomError):
        load_module_file(path, "pooling")


def test_a_file_of_no_class_is_no_module(tmp_path):
    path = tmp_path / "x.safetensors"
    save_net(torch.nn.Linear(1, 1), DENSE, {"kind": "segment"}, path)
    with pytest.raises(PatchloomError, match="not what patchloom wrote"):
        load_dense(path)


# ---- models by name and option

MODELS: tuple[dict[str, Any], ...] = (
    *({"checkpoint_path": "x.pth"}, {"pretrained": True}, {"pretrained_cfg": {}}, {"pretrained_cfg_overlay": {}}),
    *({"cache_dir": "/tmp"}, {"scriptable": True}, {"norm_layer": torch.nn.LayerNorm}, {"block_fn": print}),
    *({"embed_layer": "x"}, {"weight_init": "skip"}, {"depth": 2.5}, {"depth": math.nan}, {"qkv_bias": "yes"}),
)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_model_has_sizes_alone_in_python_too(model):
    with pytest.raises(PatchloomError, match=next(iter(model))):
        patchloom.pretrain("digits", model={"name": "nano", **model}, epochs=1)
    with pytest.raises(PatchloomError, match=next(iter(model))):
        build_encoder(EncoderSpec("nano", (16, 16), 4, options=model))


@pytest.mark.parametrize(
    "name", ["hf-hub:a/b", "hf_hub:a/b", "local-dir:/tmp", "/tmp/x.pth", "vit_tiny_patch16_224\n", "timm/vit", "", "é"]
)
def test_a_model_is_a_name_alone(name, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *given, **named: pytest.fail("timm was asked"))
    for build in (
        lambda: build_encoder(EncoderSpec(name, (16, 16), 4)),
        lambda: format.stock_encoder(name),
        lambda: format.load_encoder_file(f"timm:{name}"),
    ):
        with pytest.raises(PatchloomError):
            build()


def test_every_plain_option_is_one_of_timms():
    from inspect import signature

    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    known = {*signature(VisionTransformer).parameters, *signature(SwinTransformer).parameters}
    assert {*OPTIONS} <= known


# ---- settings of a run

SETTINGS: dict[str, Any] = {
    "img_size": "auto",
    "patch_size": [1, 2, 3],
    "channels": "3",
    "epochs": "1",
    "batch_size": -5,
    "data": {"a": 1},
    "task": "mae",
    "model": {"name": "hf-hub:a/b"},
    "seed": 1.5,
    "workers": 10**9,
    "precision": "exec",
    "nothing": 1,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_of_a_run_are_checked(name, run, capsys):
    forged(run, **{name: SETTINGS[name]})
    with pytest.raises(PatchloomError, match="not a configuration"):
        RunFolder(run).read_config()
    look(capsys, run)


@pytest.mark.parametrize("option", [{"checkpoint_path": "x"}, {"depth": "1"}, {"model_name": "local-dir:x"}])
def test_the_model_of_a_run_is_checked(option, run):
    forged(run, model={"name": "nano", **option})
    with pytest.raises(PatchloomError, match="not a configuration"):
        RunFolder(run).read_config()


@pytest.mark.parametrize(
    "found", [{"mean": "0.5"}, {"std": [[1]]}, {"height": "x"}, {"held_out": ["0"]}, {"sound": {"low": "x"}}]
)
def test_what_was_measured_of_the_data_is_checked(found, run):
    usual = {"mean": [0.5] * 3, "std": [0.2] * 3, "height": 16, "width": 16, "sampled": 1, "fingerprint": "x"}
    write_checksummed(run / "data.yaml", usual)
    assert RunFolder(run).read_stats().height == 16
    write_checksummed(run / "data.yaml", usual | found)
    with pytest.raises(PatchloomError, match="not what patchloom wrote"):
        RunFolder(run).read_stats()


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
    with pytest.raises(PatchloomError, match="repeated key data"):
        RunFolder(run).read_config()
    write_checksummed(twice, {"a": (one := [1, 2]), "b": one})  # which YAML would write as a name of the first
    assert read_checksummed(twice) == {"a": [1, 2], "b": [1, 2]}


REPEATED: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (parse_pretrain, ("digits", "--epochs", "1", "--epochs", "2")),
    (parse_pretrain, ("digits", "--epochs=1", "--epochs", "1")),
    (parse_pretrain, ("digits", "--batch-size", "8", "--batch_size", "8")),
    (parse_pretrain, ("digits", "--task", "mae", "--task.name", "lut")),
    (parse_pretrain, ("digits", "--flip", "--flip=false")),
    (parse_pretrain, ("digits", "--task.mask_ratio", "0.5", "--task.mask_ratio", "0.6")),
    (parse_evaluate, ("knn", "run", "digits", "--seed", "1", "--seed", "2")),
    (lambda words: parse_call("look", words), ("run", "--seed", "1", "--seed=2")),
    (lambda words: parse_call("export", words), ("run", "--to", "hf", "--to", "onnx")),
)


@pytest.mark.parametrize(("parse", "words"), REPEATED)
def test_an_option_is_given_once(parse, words):
    with pytest.raises(PatchloomError, match="twice"):
        parse([*words])


# ---- configurations

CONFIGS = (
    *({"data": "pipe:touch x"}, {"data": "{pi,x}pe:touch x"}, {"data": ["digits", "PIPE:x"]}, {"data": "http://h/x"}),
    *({"data": "simplecache::http://h/x"}, {"data": "digits,pipe:x"}, {"data": "hf:a/b"}, {"data": "cifar10"}),
    *({"data": "digits", "task": "evil.py:Evil"}, {"data": "digits", "task": {"name": "evil:Evil"}}),
    *({"data": "digits", "task.name": "evil.py"}, {"data": "digits", "init": "timm:vit_tiny_patch16_224"}),
    *({"data": "digits", "task": {"name": "distill", "features_of": "timm:vit_tiny_patch16_224"}},),
)


@pytest.mark.parametrize("values", CONFIGS, ids=str)
def test_a_configuration_runs_and_fetches_nothing(values, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('touched', 'w')")
    Path("run.yaml").write_text(yaml.safe_dump(values))
    assert "on the command line, too" in failed(capsys, "pretrain", "--config", "run.yaml")
    assert not Path("touched").exists() and not Path("x").exists()


def test_what_is_typed_wins_over_a_configuration(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("data: pipe:touch x\ntask: evil.py:Evil\ninit: timm:vit_tiny_patch16_224\n")
    words = ["digits", "--task", "mae", "--init", "other.safetensors", "--config", str(config)]
    given, _ = parse_pretrain(words)
    assert (given["data"], given["task"]["name"], given["init"]) == ("digits", "mae", "other.safetensors")
    config.write_text("data: shapes:20\nepochs: 1\n")
    assert parse_pretrain(["--config", str(config)])[0]["data"] == "shapes:20"


# ---- tasks of one's own

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
    file = folder / "half.py"
    file.write_text(EVIL)
    model = {"name": "nano", **SMALL, "depth": 1}
    name = f"{file}:Half"
    patchloom.pretrain(photos, name, out=folder / "run", model=model, epochs=1, batch_size=8)
    (folder / "touched").unlink()
    custom._HERE.clear()
    if hasattr(custom, "_TYPED"):
        custom._TYPED.clear()
    for one in [one for one in sys.modules if one.startswith("patchloom_")]:
        del sys.modules[one]
    return folder / "run", file


def test_a_custom_task_of_a_run_is_run_only_if_it_is_typed(own, photos, tmp_path, capsys):
    run, file = own
    touched = file.with_name("touched")
    for state in ("finished", "unfinished"):
        if state == "unfinished":
            (run / "encoder.safetensors").unlink()
            (run / "summary.txt").unlink()
        said = failed(capsys, "look", run)
        assert f"--task {file}:Half" in said
        assert f"--task {file}:Half" in failed(capsys, "evaluate", "positions", run, photos)
        # what needs the encoder alone has it
        assert main(["look", str(run), "--what", "features"]) == 0
        assert main(["evaluate", "knn", str(run), "digits", "--max_train", "50", "--ks", "1"]) == 0
        assert main(["embed", str(run), str(photos), "--to", str(tmp_path / f"{state}.npz")]) == 0
        assert main(["export", str(run), "--out", str(tmp_path / f"{state}.safetensors")]) == 0
        assert main(["report", str(run)]) == 0
        assert named_extra_module(run, "pooling") is None
        assert "--task" in failed(capsys, "pretrain", "--config", run / "config.yaml", "--out", tmp_path / "again")
        assert not touched.exists()
    assert main(["look", str(run), "--task", f"{file}:Half"]) == 0 and touched.exists()


NAMES = ("half.py:Half", "half.py", "{}/half.py:Half", "half:Half", "package.half:Half", "half.py:Half#", "./half.py:H")


@pytest.mark.parametrize("name", NAMES)
def test_a_task_that_a_run_names_by_hand_is_not_run(name, run, photos, tmp_path, monkeypatch, capsys):
    """An attacker may name it as a user would, without the digest that patchloom stores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("half.py").write_text(EVIL)
    Path("package").mkdir()
    Path("package/__init__.py").write_text(EVIL)
    Path("package/half.py").write_text(EVIL)
    forged(run, task={"name": name.format(tmp_path)})
    for digest in ("", "#0123456789abcdef"):
        forged(run, task={"name": name.format(tmp_path).rstrip("#") + digest})
        failed(capsys, "look", run)
        with pytest.raises(PatchloomError):
            load_task(run)
        # patchloom writes no name without a digest, so the configuration is rejected; else only the encoder is read
        assert main(["export", str(run)]) == (0 if digest else 2)
        # kernels are named, since a choice among them is measured
        failed(capsys, "pretrain", photos, "--task", "mae", "--kernels", "torch", "--out", run)
    assert not [*tmp_path.rglob("touched")]


def test_a_name_with_a_digest_is_not_typed(tmp_path):
    file = tmp_path / "half.py"
    file.write_text(EVIL)
    name = custom.Code.of(f"{file}:Half").with_digest().name
    with pytest.raises(PatchloomError, match="leave out #"):
        task_class(name)
    with pytest.raises(PatchloomError, match="leave out #"):
        request("digits", {"name": name}, {})
    assert not (tmp_path / "touched").exists()
    assert task_class(f"{file}:Half") is task_class(name), "it was typed meanwhile"


def test_a_task_is_no_part_of_a_stored_comparison(tmp_path):
    asked = comparing.ComparisonRequest(("digits",), ("mae", "lut"), 1, 1.0, None, {}, 1)
    pace = {"step": 1.0, "images": 8, "epoch": 10}
    stored = {"asked": asked.plain(), "epochs": {"mae": 1.0, "lut": 1.0}, "paces": {"mae": pace, "lut": pace}}
    stored |= {"top": 1.0, "held_out": 1, "threads": 1, "after": {"scoring": 1.0, "page": 1.0}, "notes": []}
    write_checksummed(tmp_path / "compare.yaml", stored)
    assert comparing.stored_plan(asked, tmp_path).epochs == {"mae": 1.0, "lut": 1.0}
    evil = {"epochs": {"mae": 1.0, "evil.py:Evil": 1.0}, "paces": {"mae": pace, "evil.py:Evil": pace}}
    for wrong in (evil, {"epochs": {"mae": "1 --task=evil.py"}, "paces": {"mae": pace}}, {"paces": {"mae": 1}}):
        write_checksummed(tmp_path / "compare.yaml", stored | wrong)
        with pytest.raises(PatchloomError, match="not the plan"):
            comparing.stored_plan(asked, tmp_path)


FAULTS = {  # a body of a task's class, and the line of its file that fails
    "built": ("    def __init__(self, encoder):\n        super().__init__(encoder)\n        {}['gone']", 5),
    "running": ("    def given(self, images, generator=None, **ratios):\n        return {}['gone']", 4),
    "augmenting": (
        "    def __init__(self, encoder):\n        super().__init__(encoder)\n        self.augment.size\n"
        "        self.augment.__class__ = type('A', (type(self.augment),), {'__call__': lambda s, *a: {}['gone']})",
        6,
    ),
    "imported": ("    {}['gone']", 3),
    "leaving": ("    raise SystemExit('gone')", 3),
}


@pytest.mark.parametrize("when", FAULTS)
def test_an_error_in_a_custom_task_names_its_line(when, photos, tmp_path, capsys):
    body, line = FAULTS[when]
    file = tmp_path / "mine.py"
    file.write_text(f"from patchloom.tasks.mae import MAE\nclass Mine(MAE):\n{body}\n")
    words = ["pretrain", photos, "--task", f"{file}:Mine", "--out", tmp_path / "run", "--epochs", "1"]
    words += ["--model", "nano", "--model.depth", "1", "--batch_size", "8", "--img_size", "16", "--patch_size", "4"]
    said = failed(capsys, *words)
    assert f"line {line}" in said and str(file) in said and "gone" in said


# ---- weights alone (review 35)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "vit_tiny.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    return path


def test_features_of_plain_weights(plain):
    with pytest.raises(PatchloomError, match="--task.features_model"):
        build("distill", features_of=str(plain))
    teacher = build("distill", features_of=str(plain), features_model="vit_tiny_patch16_224").questions["features"]
    own = teacher.teacher.encoder.state_dict()
    assert torch.equal(own["blocks.3.mlp.fc1.weight"], format.read_weights(plain)["blocks.3.mlp.fc1.weight"])
    with pytest.raises(PatchloomError, match="--task.features_model is for a file of weights alone"):
        build("distill", features_of="timm:vit_tiny_patch16_224", features_model="vit_tiny_patch16_224")


def build(name: str, **given: Any) -> Any:
    from patchloom.tasks import build_task

    vit = build_encoder(EncoderSpec("nano", (32, 32), 8, options=SMALL | {"num_heads": 2}))
    return build_task({"name": name, **given}, vit)


def test_plain_weights_are_exported_by_the_models_name(plain, tmp_path, photos):
    with pytest.raises(PatchloomError, match="--model"):
        export(plain)
    done = export(plain, model="vit_tiny_patch16_224", data=str(photos), out=tmp_path / "e.safetensors")
    assert done.difference < 1e-3 and "vit_tiny_patch16_224" in done.snippet
    with pytest.raises(PatchloomError, match="--model is for a file of weights alone"):
        export(tmp_path, model="vit_tiny_patch16_224")


def test_a_teacher_that_a_run_names_is_not_fetched(run, monkeypatch):
    write_checksummed(
        run / "data.yaml",
        {"mean": [0.5] * 3, "std": [0.2] * 3, "height": 16, "width": 16, "sampled": 1, "fingerprint": "x"},
    )
    forged(
        run, task={"name": "distill", "features_of": "timm:vit_tiny_patch16_224"}, channels=3, model={"name": "nano"}
    )
    monkeypatch.setattr("socket.create_connection", lambda *given, **named: pytest.fail("something is fetched"))
    monkeypatch.setattr("patchloom.system.network.connection_fault", lambda *given: pytest.fail("something is fetched"))
    with pytest.raises(PatchloomError, match="does not download"):
        load_task(run)


# ---- other contents of untrusted folders

FOLDERS = ("pipe:touch touched", "pipe:touch touched/x", "hf:nobody", "http:/127.0.0.1/x.tar", "a::b")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_called_like_a_command_is_none_in_a_configuration(name, tmp_path, monkeypatch, capsys):
    """The attacker ships a folder of that name beside the configuration."""
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    name = name.replace(":/", "://")  # the same path, and an address
    Path("run.yaml").write_text(yaml.safe_dump({"data": name}))
    assert "on the command line, too" in failed(capsys, "pretrain", "--config", "run.yaml")
    assert not Path("touched").exists()


@pytest.mark.parametrize("key", ["foo", "data ", "data+", "", "task.name ", "--data", "{a", "-data"])
def test_an_unknown_setting_of_a_configuration_is_no_data(key, photos, tmp_path, monkeypatch, capsys):
    """Argparse takes an unknown option with a space for a positional argument."""
    monkeypatch.chdir(tmp_path)
    photographs(Path(f"--{key.replace('-', '_')}=a b"))
    Path("run.yaml").write_text(yaml.safe_dump({key: "a b,pipe:touch touched"}))
    assert "there is no option --" in failed(capsys, "pretrain", "--config", "run.yaml")
    assert "there is no option --foo" in failed(capsys, "look", "--foo=a b")
    assert not Path("touched").exists()


def test_a_pattern_finds_folders_and_no_names(photos, tmp_path, monkeypatch):
    """All matches of a pattern are taken as folders, even if their names would mean something else when typed."""
    monkeypatch.chdir(tmp_path)
    for name in ("hf:nobody", "cifar10", "shapes:10"):
        photographs(Path("some", name))
    monkeypatch.chdir("some")
    monkeypatch.setattr("datasets.load_dataset", lambda *given, **named: pytest.fail("something is fetched"))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda *given, **named: pytest.fail("something is fetched"))
    for pattern, n in (("h*", 10), ("cif*", 10), ("shapes[:]*", 10), ("*", 30), ("{cifar10,hf:nobody}", 20)):
        assert len(open_data(pattern).train) == n
    assert len(open_stored("h*", "a run", "").train) == 10


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml", "stored.py"])
def test_a_data_set_that_a_run_names_has_no_configuration_of_its_own(file, run, server, capsys, tmp_path):
    """The library datasets downloads the files that the card of a local folder names."""
    import datasets

    home, asked = server
    stored = tmp_path / "stored"
    pixels = [torch.zeros(16, 16, 3, dtype=torch.uint8).numpy()] * 4
    some = datasets.Dataset.from_dict({"image": pixels}, datasets.Features({"image": datasets.Image()}))
    stored.mkdir()
    some.to_parquet(stored / "x.parquet")
    assert len(open_stored(f"hf:{stored}", "a run", "").train) == 4
    configs = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": f"{home}/x.parquet"}]}]}
    text = yaml.safe_dump(configs)
    (stored / file).write_text(f"---\n{text}---\n" if file == "README.md" else text)
    before = len(asked)
    assert "type" in look(capsys, forged(run, data=f"hf:{stored}"))
    assert len(asked) == before


def test_a_teacher_from_an_address_is_not_fetched(monkeypatch):
    """timm has a URL instead of a repository on the Hub for some models, so the Hub's cache does not know them."""
    name = "vit_huge_patch14_gap_224.in1k_ijepa"
    assert not timm.models.get_pretrained_cfg(name).hf_hub_id
    monkeypatch.setattr(timm, "create_model", only_sizes := sizes_alone(timm.create_model))
    with network.from_cache_alone(True, "a run names it"), pytest.raises(PatchloomError, match="a run names it"):
        load_encoder_file(f"timm:{name}")
    assert only_sizes.asked == [False]


def sizes_alone(create: Callable[..., Any]) -> Any:
    """Replace ``timm.create_model`` by a function that records whether weights are requested, and loads none."""

    def made(name: str, pretrained: bool = False, **named: Any) -> Any:
        made.asked.append(pretrained)
        assert not pretrained, "something is fetched"
        return create(name, **named)

    made.asked = []
    return made


EPS = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".bmp", ".gif"])
def test_postscript_is_no_image(suffix, tmp_path, monkeypatch, capsys, run):
    """Pillow detects formats by their content, and runs Ghostscript for PostScript files, which are programs."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **named: pytest.fail("a program is run"))
    file = tmp_path / f"x{suffix}"
    file.write_text(EPS)
    with pytest.raises(Unreadable):
        read_image(file)
    with pytest.raises(Unreadable):
        decode_image(file.read_bytes(), "x")
    if suffix == ".png":
        (run / "pictures").mkdir(exist_ok=True)
        (run / "pictures/x.png").write_text(EPS)
        found, said = collect_pictures([load_run(run)])
        assert "x.png" in said[0]


@pytest.mark.parametrize("name", ["log.txt", ".lock", "skipped.txt"])
def test_nothing_is_written_through_a_link_of_a_run(name, run, tmp_path):
    """An archive may contain links, which would redirect writes to a file of the user."""
    other = tmp_path / "bashrc"
    other.write_text("theirs\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(other)
    folder = RunFolder(run)
    with pytest.raises(PatchloomError, match="link"):
        folder.lock()
        append(folder.log, "touch x\n")
        folder.note_skipped("touch x")
    folder.unlock()
    assert other.read_text() == "theirs\n"


def test_nothing_is_written_through_a_link_of_a_comparison(tmp_path):
    other = tmp_path / "bashrc"
    other.write_text("theirs\n")
    log = tmp_path / "logs" / "mae.txt"
    log.parent.mkdir()
    log.symlink_to(other)
    job = runner.Job("mae", 0, tmp_path / "run", ["--version"], log, 1.0)
    with pytest.raises(PatchloomError, match="link"):
        runner._start(job, 0, ())
    assert other.read_text() == "theirs\n"


# ---- links, pipes and devices


def test_links_of_a_run_are_neither_followed_nor_copied(run, tmp_path, ends):
    """This is so when the run is trained longer, which copies its end."""
    private = tmp_path / "ssh"
    private.mkdir()
    (private / "id").write_text("secret")
    (run / "pictures").mkdir(exist_ok=True)
    for name, to in (("id", private / "id"), ("big.safetensors", "/dev/zero"), ("pictures/id.png", private / "id")):
        (run / name).symlink_to(to)
    os.mkfifo(run / "pipe")
    (run / "own.txt").write_text("kept")
    folder = RunFolder(run)
    folder.keep_end(1)
    end = folder.kept_end(1)
    copied = {path.name for path in end.rglob("*") if not path.is_dir()}
    assert {"own.txt", "encoder.safetensors", "summary.txt"} <= copied
    assert not copied & {"id", "big.safetensors", "id.png", "pipe"}
    assert (private / "id").read_text() == "secret" and not [path for path in end.rglob("*") if path.is_symlink()]


def test_a_full_disc_while_a_run_is_extended_is_temporary_and_leaves_nothing(run, monkeypatch):
    """The copy of its end would keep the disc full."""

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (run / "sub").mkdir()
    (run / "sub" / "own.txt").write_text("kept")
    before = sorted(run.rglob("*"))
    with monkeypatch.context() as patch, pytest.raises(TemporaryError, match="No space left") as caught:
        patch.setattr(shutil, "copyfileobj", full)
        RunFolder(run).keep_end(1)
    assert caught.value.exit_code == 75 and len(str(caught.value)) < 300
    assert sorted(path for path in run.rglob("*") if path != run / "earlier") == before
    RunFolder(run).keep_end(1)
    assert (RunFolder(run).kept_end(1) / "sub" / "own.txt").exists()


@pytest.mark.parametrize("name", ["checkpoints", "earlier", "pictures", "pictures/deeper"])
def test_a_linked_folder_of_a_run_is_refused(name, run, photos, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ".bashrc.4711").touch()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(theirs)
    forged(run)
    for words in (["look", run], ["report", run], ["evaluate", "knn", run, "digits"]):
        assert "link" in failed(capsys, *words)
    with pytest.raises(PatchloomError, match="link"):
        RunFolder(run).lock()
    assert [path.name for path in theirs.iterdir()] == [".bashrc.4711"]


def test_a_run_may_itself_be_a_link(run, tmp_path):
    (tmp_path / "short").symlink_to(run)
    folder = RunFolder(tmp_path / "short")
    folder.lock()
    folder.unlock()
    assert folder.read_config()


RUN_FILES = (
    *("config.yaml", "requested.yaml", "reasons.yaml", "data.yaml", "verdict.yaml", "trained_on.bin", "metrics.csv"),
    *("log.txt", "skipped.txt", "unreadable.txt", "summary.txt", "results.csv", "encoder.safetensors", ".lock"),
    *("start.safetensors", "checkpoints/last.safetensors", "pictures/x.png", "pictures/segment/pairs.json"),
)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("name", RUN_FILES)
def test_only_regular_files_of_a_run_are_opened(name, kind, run, photos, capsys, ends):
    forged(run)
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(kind)
    evaluate = ["evaluate", "knn", run, "digits", "--max_train", "50", "--ks", "1"]
    for words in (["report", run], evaluate, ["look", "curves", run, run], ["export", run]):
        assert main([str(word) for word in words]) in (0, 2)
        assert "unexpected" not in capsys.readouterr().err
    folder = RunFolder(run)
    with contextlib.suppress(PatchloomError):
        folder.lock()
        folder.note_skipped("a line")
        folder.note_unreadable(["a name"])
        append(folder.log, "a line")
    folder.unlock()


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_only_regular_files_configure_or_label(kind, tmp_path, encoder, photos, capsys, ends):
    path = tmp_path / "x.yaml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(kind)
    assert "regular file" in failed(capsys, "pretrain", "--config", path)
    data = tmp_path / "yolo"
    shutil.copytree(photos, data / "images")
    (data / "data.yaml").write_text(f"train: {path}\nval: images\nnames: [a]\n")
    failed(capsys, "evaluate", "detect", encoder, data / "data.yaml")
    maps = tmp_path / "maps"
    shutil.copytree(photos, maps / "images")
    (maps / "masks").mkdir()
    for file in (maps / "images").iterdir():
        (maps / "masks" / f"{file.stem}.png").symlink_to(path)
    failed(capsys, "evaluate", "segment", encoder, maps)


WIDE_NAMES = (
    "/**/*.png",
    "/*/*/*/..//*/*",
    "~/../**",
    "/**",
    "/",
    "/proc/*/*",
    "hf:/",
    "file:///*/*/x.tar",
    "{/**,x}/*",
)


@pytest.mark.parametrize("name", WIDE_NAMES)
def test_a_disc_is_searched_only_if_that_is_typed(name, run, tmp_path, capsys, ends):
    assert "type" in look(capsys, forged(run, data=name))
    assert images_of(load_run(run)).shown is None
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"data": name}))
    assert "on the command line" in failed(capsys, "pretrain", "--config", tmp_path / "x.yaml")


def test_links_do_not_widen_the_pattern_of_a_run(run, tmp_path, capsys, monkeypatch, ends):
    (tmp_path / "own" / "deep").mkdir(parents=True)
    (tmp_path / "own" / "disc").symlink_to("/")
    assert "type" in look(capsys, forged(run, data=f"{tmp_path}/own/disc/**/*.png"))
    monkeypatch.setattr("patchloom.data.sources.glob._MOST_FOLDERS", 50)
    for name in ("one", "two"):
        (tmp_path / "own" / name).symlink_to(tmp_path / "own" / "deep" / "..")
    (tmp_path / "own" / "disc").unlink()
    assert "type" in look(capsys, forged(run, data=f"{tmp_path}/own/*/*/*/*/*/*/*/*.png"))


def test_patterns_of_a_run_within_folders_are_opened(photos, tmp_path, monkeypatch):
    shutil.copytree(photos, tmp_path / "[a]" / "b")
    monkeypatch.chdir(tmp_path / "[a]")
    monkeypatch.setenv("HOME", str(tmp_path / "[a]"))
    for name in ("b/*", absolute_pattern("b/**"), f"{photos.parent}/**/*.*", absolute_pattern("b/0*")):
        assert not may_search_disc(name)
        assert open_stored(name, "a run", "").train.name == open_data(name).train.name
    assert may_search_disc(absolute_pattern("*/*")), "all of the user's home"


def test_a_card_whose_deviation_is_0_is_refused():
    spec = {"model": "nano", "img_size": [16, 16], "patch_size": 4, "channels": 3, "positions": "sincos", "options": {}}
    with pytest.raises(ValueError, match="a std is 0"):
        card_from({"spec": spec, "mean": [0.5] * 3, "std": [0.2, 0.0, 0.2], "task": "mae", "name": "e"})


# ---- names that would command the terminal

HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202e\nforged"  # a title, a colour, reversed text, and a line
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> Path:
    """A folder with data, lists, a run and an encoder whose names, classes and settings hold control characters."""
    home = tmp_path_factory.mktemp("evil") / HOSTILE
    for part in ("train", "test"):
        for name in ("x", "y"):
            photographs(home / "data" / part / f"{HOSTILE}{name}")
            for path in (home / "data" / part / f"{HOSTILE}{name}").iterdir():
                path.rename(path.with_name(f"{HOSTILE}{path.name}"))
            (home / "data" / part / f"{HOSTILE}{name}" / f"{HOSTILE}.png").write_bytes(b"broken")
    a_run(home / HOSTILE, home / "data" / "train" / f"{HOSTILE}x")
    (home / HOSTILE / "summary.txt").write_text(f"{HOSTILE}\n")
    (home / HOSTILE / "reasons.yaml").write_text(yaml.safe_dump({HOSTILE: HOSTILE}))
    an_encoder(home / "encoder", home / "data" / "train" / f"{HOSTILE}x")
    with_card(home / "encoder" / "e.safetensors", lambda card: card | {"name": HOSTILE, "task": HOSTILE})
    save_file({HOSTILE: torch.zeros(2)}, home / "foreign.safetensors")
    with open(home / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", HOSTILE])
        writer.writerows(
            [f"data/train/{HOSTILE}x/{HOSTILE}{i}.png", f"{HOSTILE}{i % 2}", HOSTILE] for i in (0, 2, 4, 6, 8)
        )
    (home / "config.yaml").write_text(yaml.safe_dump({"data": str(home / "data"), "task.name": HOSTILE}))
    (home / "empty").mkdir()
    with tarfile.open(home / "shards.tar", "w") as tar:
        tar.add(home / "data" / "train" / f"{HOSTILE}x" / f"{HOSTILE}0.png", f"{HOSTILE}.png")
    return home


SMALLEST = ["--model", "nano", "--model.depth", "1", "--epochs", "1", "--batch_size", "4", "--img_size", "16"]
SMALLEST += ["--patch_size", "4"]
PRINTING = {
    "check": ["check", "data"],
    "check a table": ["check", "table.csv"],
    "check shards": ["check", "shards.tar"],
    "check nothing": ["check", "empty"],
    "pretrain": ["pretrain", "data", "--task", "mae", "--out", f"{HOSTILE}new", *SMALLEST],
    "pretrain again": ["pretrain", "data", "--task", "mae", "--out", HOSTILE, *SMALLEST],
    "pretrain --config": ["pretrain", "--config", "config.yaml"],
    "pretrain --task": ["pretrain", "data", "--task", HOSTILE],
    "evaluate": ["evaluate", "knn", HOSTILE, "data", "--ks", "1"],
    "evaluate a card": ["evaluate", "linear", "encoder/e.safetensors", "data"],
    "evaluate segment": ["evaluate", "segment", HOSTILE, "data"],
    "compare": ["compare", "data", "--tasks", "mae,lut", "--minutes", "1", "--dry-run"],
    "embed": ["embed", HOSTILE, "data", "--to", f"{HOSTILE}.npz", "--near", f"data/test/{HOSTILE}x/{HOSTILE}2.png"],
    "predict": ["predict", HOSTILE, "data"],
    "look": ["look", HOSTILE, "data", "--what", "features"],
    "look curves": ["look", "curves", HOSTILE, HOSTILE],
    "report": ["report", HOSTILE],
    "export": ["export", HOSTILE, "--out", f"{HOSTILE}.safetensors"],
    "export weights": ["export", "foreign.safetensors"],
    "distill": ["distill", "encoder/e.safetensors", "data", "--student", HOSTILE],
    "bench": ["bench", "data", "--tasks", HOSTILE],
    "tasks": ["tasks", HOSTILE],
    "recipes": ["recipes", HOSTILE],
    "no verb": [HOSTILE],
    "help": ["pretrain", "--task", HOSTILE, "--help"],
}


@pytest.mark.parametrize("verb", PRINTING)
def test_no_name_commands_the_terminal(verb, evil, monkeypatch, capfd):
    """Neither the escape sequences nor the line breaks of names are printed, and JSON escapes them."""
    monkeypatch.chdir(evil)
    assert main(PRINTING[verb]) in (0, 2)
    printed = "".join(capfd.readouterr())
    assert not CONTROL.search(printed), CONTROL.search(printed)
    assert printed and not re.search("^forged", printed, re.MULTILINE), printed
    main([*PRINTING[verb], "--json"])
    assert not CONTROL.search(capfd.readouterr().out)


def test_every_verb_that_prints_is_tried():
    assert {words[0] for words in PRINTING.values()} >= {*VERBS}


def test_only_the_last_printers_print():
    """All others would need to escape names: see `patchloom.display.visible`."""
    package = Path(patchloom.__file__).parent
    own = {"display.py", "cli.py", "train/metrics.py"}
    for path in package.rglob("*.py"):
        if str(path.relative_to(package)) not in own:
            assert not re.search(r"(?<![\w.])print\(|sys\.std(out|err)\.write", path.read_text("utf-8")), path


def test_an_error_message_has_an_end(capsys):
    said = failed(capsys, "pretrain", "x" * 10**6 + "/y")
    assert (
        len(said) < 5000
        and said.rstrip().endswith("y does not exist: give a folder, or a text file of paths")
        or "…" in said
    )
