"""Every verb accepts every kind of encoder source, or refuses it with the same message."""

import re
import shutil

import pytest
import torch
from killing import SMALL

import patchloom
from patchloom.errors import PatchloomError

pytestmark = pytest.mark.usefixtures("quick_probe")

SIZES = {name: value for name, value in SMALL.items() if name not in ("model", "img_size", "patch_size")}
# what reads an encoder, by the verb: of a source, the images and a folder to write to
VERBS = {
    "load_encoder": lambda source, images, out: patchloom.load_encoder(source),
    "evaluate": lambda source, images, out: patchloom.evaluate("knn", source, images, device="cpu", ks=(1,)),
    "look": lambda source, images, out: patchloom.look(source, images, what="attention", images=1, out=out / "look"),
    "embed": lambda source, images, out: patchloom.embed(source, images, to=out / "vectors.npz"),
    "export": lambda source, images, out: patchloom.export(source, out=out / "timm.safetensors"),
    "init": lambda source, images, out: patchloom.pretrain(
        images, "mae", init=source, out=out / "init", **SIZES | {"epochs": 1}
    ),
    "features_of": lambda source, images, out: patchloom.pretrain(
        images, {"name": "distill", "features_of": str(source)}, out=out / "distilled", **SMALL | {"epochs": 1}
    ),
}
KINDS = ("run", "file", "timm's folder", "transformers' folder")


@pytest.fixture(scope="module")
def sources(small_run, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("sources")
    run = shutil.copytree(small_run("mae"), folder / "run")
    patchloom.export(run, to="hf", out=folder / "exported")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).save_pretrained(folder / "dinov2")
    files = (run, run / "encoder.safetensors", folder / "exported", folder / "dinov2")
    return dict(zip(KINDS, files, strict=True))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_takes_every_kind(verb, kind, sources, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert VERBS[verb](sources[kind], images, tmp_path) is not None


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_with_the_same_message(verb, sources, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "other.pth")
    (tmp_path / "empty").mkdir()
    for source, said in {
        tmp_path / "nothing": f"there is no encoder at {tmp_path}/nothing",
        tmp_path / "empty": f"there is no encoder at {tmp_path}/empty",
        tmp_path / "other.pth": "other.pth holds weights alone",
    }.items():
        if (verb, source.name) == ("init", "other.pth"):  # which may go into a model that the user names
            said = "its names are like layer.weight, and timm's"
        with pytest.raises(PatchloomError, match=re.escape(said)):
            VERBS[verb](source, images, tmp_path)
