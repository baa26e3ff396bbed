"""Repositories of the Hugging Face Hub by their address, and the licences that weights state; nothing is fetched."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from timm.models import save_for_hf

import patchloom
from patchloom.errors import PatchloomError
from patchloom.export.export import export
from patchloom.nets.checkpoints import format
from patchloom.nets.checkpoints.format import (
    EncoderCard,
    load_encoder_file,
    read_encoder_card,
    save_encoder,
    timm_license,
)
from patchloom.nets.checkpoints.load import Weights, kind_of, load_pretrained, public_shape
from patchloom.runs.encoder import load_encoder

ADDRESS = "timm:hf-hub:somebody/small"
SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that answers for the Hub, with weights in timm's format."""
    folder = tmp_path / "repository"
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, init_values=0.1, **SIZES)
    model.pretrained_cfg = model.pretrained_cfg | {"architecture": "vit_tiny_patch16_224", "input_size": (3, 32, 32)}
    save_for_hf(model, folder, model_config={"model_args": SIZES | {"init_values": 0.1}}, safe_serialization=True)
    asked = []

    def download(repo_id, filename, *, revision=None):
        asked.append((repo_id, filename, revision))
        if not (folder / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(format, "why_offline", lambda: "")
    return folder, asked


def test_a_repository_is_read_like_its_folder(repository):
    folder, asked = repository
    vit, card = load_encoder(f"{ADDRESS}@v2")
    there, its = load_pretrained(folder)
    assert all(torch.equal(weight, there.state_dict()[name]) for name, weight in vit.state_dict().items())
    assert (card.spec, card.mean, card.std) == (its.spec, its.mean, its.std) and card.name == "small@v2"
    assert kind_of(ADDRESS) == "hub" and {(repo, revision) for repo, _, revision in asked} == {("somebody/small", "v2")}
    assert {name for _, name, _ in asked} <= {
        "config.json",
        "README.md",
        "preprocessor_config.json",
        "model.safetensors",
    }
    assert public_shape(Weights(ADDRESS))["options"]["embed_dim"] == 32
    with pytest.raises(PatchloomError, match="has no folder for an export: give --out"):
        export(ADDRESS)
    assert export(ADDRESS, out=folder / "exported.safetensors").images == 16


def test_torchs_file_is_read_where_there_is_no_other(repository):
    folder, _ = repository
    torch.save(load_pretrained(folder)[0].state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_encoder(ADDRESS)[1].spec.options["embed_dim"] == 32


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architecture": "resnet50"}, "and patchloom supports"),
        ({"architecture": "os.system"}, "timm has no model called"),
        ({"model_args": {"img_size": 10**9}}, "is not the configuration of a model"),
        ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "is not the configuration of a model"),
    ],
)
def test_its_configuration_is_checked(repository, changed, said):
    folder, _ = repository
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(PatchloomError, match=said):
        load_encoder(ADDRESS)


def test_without_a_network_one_sentence_says_what_to_do(monkeypatch):
    def fails(*_, **__):
        raise OSError("not in the cache\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    for offline, reason in (("huggingface.co does not answer", "does not answer"), ("", "not in the cache")):
        monkeypatch.setattr(format, "why_offline", lambda answer=offline: answer)
        with pytest.raises(
            PatchloomError, match=rf"{reason}\): check the network.* give that file with --model"
        ) as one:
            load_encoder(ADDRESS)
        assert "\n" not in str(one.value)
    for name in ("timm:hf-hub:", "timm:hf-hub:small", "timm:hf-hub:../../etc/passwd"):
        with pytest.raises(PatchloomError, match="names no repository of the Hub"):
            load_encoder(name)


def test_a_run_begins_with_a_repository(repository, tmp_path):
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8, generator=rng)
    (repository[0] / "README.md").write_text("---\nlicense: other\nlicense_name: dinov3-license\n---\n# Model\n")
    given = {"task": "mae", "epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu", "kernels": "torch"}
    run = patchloom.pretrain(images, init=ADDRESS, out=tmp_path / "run", **given).folder
    _, card = load_encoder(run)
    assert card.spec.options["embed_dim"] == 32 and card.license == "dinov3-license"
    assert read_encoder_card(run / "start.safetensors").license == "dinov3-license"
    again = patchloom.pretrain(images, from_run=str(run), out=tmp_path / "again", **given).folder
    assert load_encoder(again)[1].license == "dinov3-license"  # of the weights at the end of the chain
    fresh = patchloom.pretrain(images, model="nano", out=tmp_path / "fresh", **given).folder
    assert load_encoder(fresh)[1].license == ""
    assert (
        load_encoder(patchloom.pretrain(images, init=str(fresh), out=tmp_path / "b", **given).folder)[1].license == ""
    )


def test_licences_are_those_that_the_source_states(repository, tmp_path):
    folder, _ = repository
    vit, _ = load_pretrained(folder)
    assert Weights(folder).license == Weights(ADDRESS).license == "apache-2.0"  # timm's, in its configuration
    # 2024-13-45 is no date, and !!int no integer
    headers = {"license: mit\ndate: 2024-13-45": "mit", "license: mit\na: !!int": "mit"}
    headers |= {"license: [1]": "apache-2.0", "- a: [": "apache-2.0"}
    for header, license in headers.items():
        (folder / "README.md").write_text(f"---\n{header}\n---\n")
        assert Weights(folder).license == license
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"].pop("license")
    (folder / "config.json").write_text(json.dumps(config))
    assert Weights(folder).license == "unknown"
    for about, license in (({}, "unknown"), ({"license": "cc-by-4.0"}, "cc-by-4.0"), ({"license": "a\nb\x1b"}, "a b?")):
        save_file(vit.state_dict(), tmp_path / "bare.safetensors", about)
        assert Weights(tmp_path / "bare.safetensors").license == license
    torch.save(vit.state_dict(), tmp_path / "bare.pth")
    assert Weights(tmp_path / "bare.pth").license == "unknown"
    assert timm_license("vit_small_patch16_dinov3.lvd1689m") == "dinov3-license"
    assert (
        Weights("timm:vit_tiny_patch16_224").license == timm.models.get_pretrained_cfg("vit_tiny_patch16_224").license
    )


def test_a_card_keeps_its_licence_and_older_files_have_none(repository, tmp_path):
    vit, card = load_pretrained(repository[0])
    for license in ("", "apache-2.0"):
        path = tmp_path / "encoder.safetensors"
        save_encoder(vit, EncoderCard(card.spec, card.mean, card.std, "mae", "one", license=license), path)
        assert load_encoder_file(path)[1].license == license == Weights(path).license
        assert (b"license" in Path(path).read_bytes()) == bool(license)
