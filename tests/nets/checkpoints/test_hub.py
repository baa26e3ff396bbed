"""Models of the Hugging Face Hub, in folders and by their address, and their licences; nothing is fetched."""

import json
import math
import re
from dataclasses import replace

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from published import TINY, ours, written
from refusing import refusal, rejection
from safetensors.torch import save_file
from timm.models import save_for_hf

import patchloom
from patchloom.errors import PatchloomError
from patchloom.export.export import export
from patchloom.nets.checkpoints import format
from patchloom.nets.checkpoints.fit import inherit, load_pretrained, load_published
from patchloom.nets.checkpoints.format import read_encoder_card, save_encoder, timm_license
from patchloom.nets.checkpoints.origin import Weights, kind_of, public_shape
from patchloom.nets.checkpoints.programs import DINOV2_PROGRAM, MAE_PROGRAM
from patchloom.runs.encoder import load_encoder
from patchloom.tasks import build_task

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
MLP = {"intermediate_size": 64}
DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
PIXELS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
MODELS = {
    "ViTModel": ("ViTConfig", MLP),
    "ViTForImageClassification": ("ViTConfig", MLP | {"num_labels": 3}),
    "ViTMAEModel": ("ViTMAEConfig", MLP | {"mask_ratio": 0.0}),
    "ViTMAEForPreTraining": ("ViTMAEConfig", MLP | DECODER | {"decoder_intermediate_size": 64, "mask_ratio": 0.0}),
    "Dinov2Model": ("Dinov2Config", {}),
    "Dinov2ForImageClassification": ("Dinov2Config", {"num_labels": 3}),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", {}),
}


def made(name, folder, pixels=PIXELS, tokens=0.1, **more):
    """Build a model of transformers without weights at zero or one, and its folder."""
    config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**SIZES | options | more)).eval()
    if name.startswith("ViTMAE"):  # its fixed table is made when its weights are loaded
        embeddings = getattr(model, "vit", model).embeddings
        embeddings.patch_embeddings.projection._is_hf_initialized = False
        embeddings.initialize_weights()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "position_embeddings" not in weight_name or not name.startswith("ViTMAE"):  # MAE's positions are fixed
                weight.add_(torch.randn_like(weight) * (tokens if "embeddings." in weight_name else 0.1))
    model.save_pretrained(folder)
    if pixels is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return model


def features(model, images):
    """Return the tokens after the final norm; shuffling of a masked autoencoder is switched off."""
    inner = getattr(model, model.base_model_prefix, model)
    order = {"noise": torch.arange(16.0).expand(len(images), -1)} if "MAE" in type(model).__name__ else {}
    with torch.inference_mode():
        return inner(images, **order).last_hidden_state


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("more", [{"layer_norm_eps": 1e-6, "qkv_bias": False}, {}])
def test_features_are_those_of_transformers_also_by_the_names_of_its_classes(tmp_path, name, more):
    # timm's norms add 1e-6; with transformers' usual 1e-12, the difference shows only below a variance near 1
    model = made(name, tmp_path, tokens=0.1 if more else 1.0, **more)
    vit, card = load_pretrained(tmp_path)
    images = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(vit.forward_features(images), features(model, images), rtol=0, atol=1e-5)
    assert (card.mean, card.std) == (tuple(PIXELS["image_mean"]), tuple(PIXELS["image_std"])) and not vit.training
    assert vit.blocks[0].attn.num_heads == 4 and "4 attention heads are those in its config.json" in card.note
    assert card.spec.img_size == (16, 16) and card.name == tmp_path.name and kind_of(tmp_path) == "hub"
    assert card.spec.positions == ("sincos" if "MAE" in name else "learned")
    again = ours(
        **Weights(tmp_path).architecture.spec.options
    )  # in a state_dict, names since 5.0 differ from those saved
    assert not load_published(again, written(tmp_path / "own.pth", model.state_dict())).missing
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in vit.state_dict().items())


def test_the_original_program_is_recognised(tmp_path):
    made("Dinov2Model", tmp_path / "dinov2", pixels=None)
    made("ViTMAEForPreTraining", tmp_path / "mae", pixels=None)
    made("ViTModel", tmp_path / "vit", pixels=None)
    assert Weights(tmp_path / "dinov2").program is DINOV2_PROGRAM and Weights(tmp_path / "mae").program is MAE_PROGRAM
    for name, said in {"dinov2": "in DINOv2", "mae": "in MAE"}.items():
        assert f"Images are normalised as {said}: mean 0.485" in load_pretrained(tmp_path / name)[1].note
    assert "put its preprocessor_config" in refusal(load_pretrained, tmp_path / "vit")
    assert public_shape(Weights(tmp_path / "vit"))["options"]["num_heads"] == 4  # enough for a start
    assert "give --model.num_heads 4" in refusal(load_published, ours(num_heads=2), tmp_path / "vit")


def test_the_decoder_of_transformers_mae_is_loaded(tmp_path):
    model = made("ViTMAEForPreTraining", tmp_path)
    weights = Weights(tmp_path)
    vit = ours(positions="sincos", **weights.architecture.spec.options)
    done = load_published(vit, weights, task="mae")
    task = build_task({"name": "mae", "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}, vit)
    assert inherit(done.foreign, task, True, "x") == ["Also loaded, from MAE: pixel decoder."]
    own, pixels = model.state_dict(), task.questions["pixels"].decoder.state_dict()
    assert torch.equal(pixels["embed.weight"], own["decoder.decoder_embed.weight"])
    joined = [own[f"decoder.decoder_layers.0.attention.{one}_proj.weight"] for one in "qkv"]
    assert torch.equal(pixels["blocks.0.attn.qkv.weight"], torch.cat(joined))


SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("vit_tiny_patch16_224", (16, 24), {"img_size": (16, 24), "patch_size": 4, **TINY}),
        ("vit_tiny_patch16_224", (16, 16), {"img_size": 16, "patch_size": 4, "pos_embed": "none", **TINY}),
        ("swin_tiny_patch4_window7_224", (32, 32), {"img_size": 32, **SWIN}),
    ],
)
def test_a_folder_in_timms_format(tmp_path, name, size, arguments):
    torch.manual_seed(0)
    model = timm.create_model(name, **arguments, num_classes=5).eval()
    model.pretrained_cfg = model.pretrained_cfg | {"input_size": (3, *size)}
    save_for_hf(model, str(tmp_path), model_args=arguments, safe_serialization=True)
    vit, card = load_pretrained(tmp_path)
    images = torch.randn(1, 3, *size)
    with torch.inference_mode():
        assert torch.equal(vit.forward_features(images), model.forward_features(images))
    assert card.mean == tuple(model.pretrained_cfg["mean"]) and card.spec.model == name
    assert public_shape(Weights(tmp_path))["name"] == name
    assert "--model is for a file of weights alone" in refusal(load_pretrained, tmp_path, "vit_tiny_patch16_224")
    with pytest.raises(PatchloomError, match="--task.features_model is for a file of weights alone"):
        build_task({"name": "distill", "features_of": str(tmp_path), "features_model": "x"}, ours())


def test_images_that_are_not_normalised(tmp_path):
    made("ViTModel", tmp_path, PIXELS | {"do_normalize": False})
    assert Weights(tmp_path).stated.statistics == ((0.0,) * 3, (1.0,) * 3)
    for other in ({"rescale_factor": 1 / 127.5}, {"do_rescale": False}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS | other))
        with pytest.raises(PatchloomError, match="preprocessor_config.json multiplies images by .*, and 1/255 is"):
            load_pretrained(tmp_path)


TIMMS = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 16, 16]}}
WHOLE = {"input_size": [3, 16, 16], "mean": [0.5] * 3, "std": [0.5] * 3}
ARGUMENTS = {"checkpoint_path": "/tmp/evil.pth", "pretrained_cfg": {"file": "/tmp/evil.pth"}, "norm_layer": "os.system"}
ARGUMENTS |= {"embed_dim": 65_536, "depth": 1000, "img_size": [10**9, 10**9]}


@pytest.mark.parametrize(
    "change",
    [
        *({"num_attention_heads": heads} for heads in (None, "4", 2**70, 5)),
        *({"model_type": kind} for kind in ("beit", ["vit"])),
        {"hidden_act": "quick_gelu"},
        {"use_swiglu_ffn": True},
        *({"layer_norm_eps": eps} for eps in (0.1, math.nan)),
        TIMMS,  # without statistics
        *(
            TIMMS | {"architecture": name}
            for name in ("hf-hub:nobody/model", "local-dir:/tmp", "os.system", "resnet50")
        ),
        *(
            TIMMS | {"pretrained_cfg": WHOLE, "model_args": {"patch_size": 4, name: value}}
            for name, value in ARGUMENTS.items()
        ),
    ],
    ids=lambda change: str(change)[:60],
)
def test_invalid_values_in_a_configuration(tmp_path, change):
    made("ViTModel", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refusal(load_pretrained, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 10**5, "\udcff", "x" * 2**21])
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_an_invalid_configuration(tmp_path, file, content):
    made("ViTModel", tmp_path)
    (tmp_path / file).write_bytes(content.encode(errors="surrogateescape"))
    assert f"{file} cannot be read as a configuration" in refusal(load_pretrained, tmp_path)


def test_a_small_file_does_not_make_a_large_net(tmp_path):
    """Sizes are inferred from weights, and few numbers can state large ones."""
    state = {f"blocks.{i}.norm1.weight": torch.zeros(1280) for i in range(500)}
    state |= {"blocks.0.mlp.fc1.weight": torch.zeros(2, 1280), "blocks.0.ls1.gamma": torch.zeros(1280)}
    state |= {"pos_embed": torch.zeros(1, 2, 1280), "mask_token": torch.zeros(1, 1280)}
    state |= {"patch_embed.proj.weight": torch.zeros(1280, 1, 1, 1), "cls_token": torch.zeros(1, 1, 1280)}
    assert "holds fewer weights than" in refusal(load_pretrained, written(tmp_path / "bomb.safetensors", state))


ADDRESS = "timm:hf-hub:somebody/small"
STOCK = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}
FILES = {"config.json", "README.md", "preprocessor_config.json", "model.safetensors"}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that answers for the Hub, with weights in timm's format."""
    folder = tmp_path / "repository"
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, init_values=0.1, **STOCK)
    model.pretrained_cfg = model.pretrained_cfg | {"architecture": "vit_tiny_patch16_224", "input_size": (3, 32, 32)}
    save_for_hf(model, folder, model_config={"model_args": STOCK | {"init_values": 0.1}}, safe_serialization=True)
    asked = []

    def download(repo_id, filename, *, revision=None):
        asked.append((repo_id, filename, revision))
        if not (folder / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(format, "why_offline", lambda: "")
    return folder, asked


def test_a_repository_is_read_like_its_folder_and_from_torchs_file_if_there_is_no_other(repository):
    folder, asked = repository
    vit, card = load_encoder(f"{ADDRESS}@v2")
    there, its = load_pretrained(folder)
    assert all(torch.equal(weight, there.state_dict()[name]) for name, weight in vit.state_dict().items())
    assert (card.spec, card.mean, card.std) == (its.spec, its.mean, its.std) and card.name == "small@v2"
    assert kind_of(ADDRESS) == "hub" and {(repo, revision) for repo, _, revision in asked} == {("somebody/small", "v2")}
    assert {name for _, name, _ in asked} <= FILES
    assert public_shape(Weights(ADDRESS))["options"]["embed_dim"] == 32
    assert "has no folder for an export: give --out" in refusal(export, ADDRESS)
    assert export(ADDRESS, out=folder / "exported.safetensors").images == 16
    torch.save(there.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_encoder(ADDRESS)[1].spec.options["embed_dim"] == 32


@pytest.mark.parametrize("offline", ["huggingface.co does not answer", ""])
def test_without_a_network_the_cache_is_tried_and_one_sentence_says_what_to_do(monkeypatch, offline):
    def fails(*_, **__):
        assert constants.HF_HUB_OFFLINE == bool(offline)
        raise OSError("not in the cache\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    monkeypatch.setattr(format, "why_offline", lambda: offline)
    said = rf"{offline or 'not in the cache'}\): check the network.* give that file with --model"
    error = rejection(load_encoder, ADDRESS)
    assert re.search(said, str(error)) and not constants.HF_HUB_OFFLINE
    assert error.exit_code == (75 if offline else 2)
    for name in ("timm:hf-hub:", "timm:hf-hub:small", "timm:hf-hub:../../etc/passwd"):
        assert "names no repository of the Hub" in refusal(load_encoder, name)


GIVEN = {"epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu", "kernels": "torch"}
DINOV3 = "---\nlicense: other\nlicense_name: dinov3-license\n---\n# Model\n"


@pytest.fixture
def arrays():
    return torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def trained(arrays, out, task="mae", **more):
    folder = patchloom.pretrain(arrays, task, out=out, **GIVEN | more).folder
    return folder, load_encoder(folder)[1]


@pytest.mark.usefixtures("quick_probe")
def test_licences_are_those_at_the_end_of_the_chain_and_of_the_teacher(repository, arrays, small_run, tmp_path):
    vit, card = load_encoder(ADDRESS)
    save_encoder(vit, replace(card, license="mit"), tmp_path / "begin.safetensors")
    (repository[0] / "README.md").write_text(DINOV3)
    run, card = trained(arrays, tmp_path / "run", init=ADDRESS)
    assert card.spec.options["embed_dim"] == 32 and card.license == "dinov3-license"
    assert read_encoder_card(run / "start.safetensors").license == "dinov3-license"
    assert trained(arrays, tmp_path / "again", from_run=str(run))[1].license == "dinov3-license"
    assert load_encoder(small_run("mae"))[1].license == ""  # begins with random weights
    task = {"name": "distill", "features_of": ADDRESS}
    begun = trained(arrays, tmp_path / "both", task, init=str(tmp_path / "begin.safetensors"))[1]
    assert begun.license == "mit AND dinov3-license"
    teacher, out = run / "encoder.safetensors", tmp_path / "student"
    patchloom.distill(teacher, arrays, student="resnet10t", epochs=1, batch_size=8, workers=0, out=out)
    assert json.loads((out / "student.json").read_text())["license"] == "dinov3-license"


def test_licences_are_those_that_the_source_states(repository, tmp_path):
    folder, _ = repository
    vit, _ = load_pretrained(folder)
    assert (
        Weights(folder).stated.license == Weights(ADDRESS).stated.license == "apache-2.0"
    )  # timm's, in its configuration
    # 2024-13-45 is no date, and !!int no integer
    headers = {"license: mit\ndate: 2024-13-45": "mit", "license: mit\na: !!int": "mit"}
    headers |= {"license: [1]": "apache-2.0", "- a: [": "apache-2.0"}
    for header, license in headers.items():
        (folder / "README.md").write_text(f"---\n{header}\n---\n")
        assert Weights(folder).stated.license == license
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"license"', '"other"'))
    assert Weights(folder).stated.license == "unknown"
    for about, license in (({}, "unknown"), ({"license": "cc-by-4.0"}, "cc-by-4.0"), ({"license": "a\nb\x1b"}, "a b?")):
        save_file(vit.state_dict(), tmp_path / "bare.safetensors", about)
        assert Weights(tmp_path / "bare.safetensors").stated.license == license
    torch.save(vit.state_dict(), tmp_path / "bare.pth")
    assert Weights(tmp_path / "bare.pth").stated.license == "unknown"
    assert timm_license("vit_small_patch16_dinov3.lvd1689m") == "dinov3-license"
    assert Weights("timm:vit_tiny_patch16_224").stated.license == "apache-2.0"
