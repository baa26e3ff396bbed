"""Folders of the Hugging Face Hub, built from sizes without network; transformers and timm are the reference."""

import json
import math

import pytest
import timm
import torch
from published import TINY, ours, written
from timm.models import save_for_hf

import patchloom
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.load import Weights, inherit, kind_of, load_pretrained, load_published, public_shape
from patchloom.nets.checkpoints.programs import DINOV2_PROGRAM, MAE_PROGRAM
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
@pytest.mark.parametrize("more", [{"layer_norm_eps": 1e-6}, {"layer_norm_eps": 1e-6, "qkv_bias": False}, {}])
def test_features_are_those_of_transformers(tmp_path, name, more):
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


@pytest.mark.parametrize("name", ["ViTModel", "ViTMAEForPreTraining", "Dinov2WithRegistersModel"])
def test_names_of_transformers_classes_are_read_like_saved_names(tmp_path, name):
    """Names of transformers' classes since 5.0, as in a saved state_dict, differ from those in its files."""
    model = made(name, tmp_path)
    first, second = Weights(tmp_path), Weights(written(tmp_path / "own.pth", model.state_dict()))
    options = Weights(tmp_path).architecture.options
    vits = [ours(**options) for _ in range(2)]
    for vit, weights in zip(vits, (first, second), strict=True):
        assert not load_published(vit, weights).missing
    assert all(torch.equal(one, other) for one, other in zip(*(vit.state_dict().values() for vit in vits), strict=True))


def test_the_original_program_is_recognised(tmp_path):
    made("Dinov2Model", tmp_path / "dinov2", pixels=None)
    made("ViTMAEForPreTraining", tmp_path / "mae", pixels=None)
    made("ViTModel", tmp_path / "vit", pixels=None)
    assert Weights(tmp_path / "dinov2").program is DINOV2_PROGRAM and Weights(tmp_path / "mae").program is MAE_PROGRAM
    for name, said in {"dinov2": "in DINOv2", "mae": "in MAE"}.items():
        assert f"Images are normalised as {said}: mean 0.485" in load_pretrained(tmp_path / name)[1].note
    with pytest.raises(PatchloomError, match="put its preprocessor_config"):
        load_pretrained(tmp_path / "vit")
    assert public_shape(Weights(tmp_path / "vit"))["options"]["num_heads"] == 4  # enough for a start
    with pytest.raises(PatchloomError, match="give --model.num_heads 4"):
        load_published(ours(num_heads=2), tmp_path / "vit")


def test_the_decoder_of_transformers_mae_is_loaded(tmp_path):
    model = made("ViTMAEForPreTraining", tmp_path)
    weights = Weights(tmp_path)
    vit = ours(positions="sincos", **weights.architecture.options)
    done = load_published(vit, weights, task="mae")
    task = build_task({"name": "mae", "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}, vit)
    assert inherit(done.foreign, task, True, "x") == ["Also loaded, from MAE: pixel decoder."]
    own, pixels = model.state_dict(), task.questions["pixels"].decoder.state_dict()
    assert torch.equal(pixels["embed.weight"], own["decoder.decoder_embed.weight"])
    joined = [own[f"decoder.decoder_layers.0.attention.{one}_proj.weight"] for one in "qkv"]
    assert torch.equal(pixels["blocks.0.attn.qkv.weight"], torch.cat(joined))


@pytest.mark.parametrize(
    "arguments",
    [
        {"model_name": "vit_tiny_patch16_224", "img_size": (16, 24), "patch_size": 4, **TINY},
        {"model_name": "vit_tiny_patch16_224", "img_size": 16, "patch_size": 4, "pos_embed": "none", **TINY},
        {
            "model_name": "swin_tiny_patch4_window7_224",
            **{"img_size": 32, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4},
        },
    ],
)
def test_a_folder_in_timms_format(tmp_path, arguments):
    torch.manual_seed(0)
    model = timm.create_model(**arguments, num_classes=5).eval()
    own = {name: value for name, value in arguments.items() if name != "model_name"}
    model.pretrained_cfg = model.pretrained_cfg | {"input_size": (3, *([own["img_size"]] * 2))}
    if isinstance(own["img_size"], tuple):
        model.pretrained_cfg["input_size"] = (3, *own["img_size"])
    save_for_hf(model, str(tmp_path), model_args=own, safe_serialization=True)
    vit, card = load_pretrained(tmp_path)
    images = torch.randn(1, *model.pretrained_cfg["input_size"])
    with torch.inference_mode():
        assert torch.equal(vit.forward_features(images), model.forward_features(images))
    assert card.mean == tuple(model.pretrained_cfg["mean"]) and card.spec.model == arguments["model_name"]
    assert public_shape(Weights(tmp_path))["name"] == arguments["model_name"]
    with pytest.raises(PatchloomError, match="--model is for a file of weights alone"):
        load_pretrained(tmp_path, "vit_tiny_patch16_224")
    with pytest.raises(PatchloomError, match="--task.features_model is for a file of weights alone"):
        build_task({"name": "distill", "features_of": str(tmp_path), "features_model": "x"}, ours())


def test_images_that_are_not_normalised(tmp_path):
    made("ViTModel", tmp_path, PIXELS | {"do_normalize": False})
    assert Weights(tmp_path).hub.statistics == ((0.0,) * 3, (1.0,) * 3)
    for other in ({"rescale_factor": 1 / 127.5}, {"do_rescale": False}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS | other))
        with pytest.raises(PatchloomError, match="preprocessor_config.json multiplies images by .*, and 1/255 is"):
            load_pretrained(tmp_path)


BROKEN = {
    "no heads": {"num_attention_heads": None},
    "heads of text": {"num_attention_heads": "4"},
    "heads without end": {"num_attention_heads": 2**70},
    "heads that do not divide": {"num_attention_heads": 5},
    "another kind": {"model_type": "beit"},
    "a kind that is no text": {"model_type": ["vit"]},
    "another activation": {"hidden_act": "quick_gelu"},
    "gated": {"use_swiglu_ffn": True},
    "another epsilon": {"layer_norm_eps": 0.1},
    "nan": {"layer_norm_eps": math.nan},
    "timm's, by an address": {"architecture": "hf-hub:nobody/model", "pretrained_cfg": {"input_size": [3, 16, 16]}},
    "timm's, of a folder": {"architecture": "local-dir:/tmp", "pretrained_cfg": {"input_size": [3, 16, 16]}},
    "timm's, without statistics": {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 8, 8]}},
    **{
        f"timm's, with {name}": {
            "architecture": "vit_tiny_patch16_224",
            "pretrained_cfg": {"input_size": [3, 16, 16], "mean": [0.5] * 3, "std": [0.5] * 3},
            "model_args": {"patch_size": 4, name: value},
        }
        for name, value in {
            "checkpoint_path": "/tmp/evil.pth",
            "pretrained_cfg": {"file": "/tmp/evil.pth"},
            "norm_layer": "os.system",
            "embed_dim": 65_536,
            "depth": 1000,
            "img_size": [10**9, 10**9],
        }.items()
    },
}


@pytest.mark.parametrize("change", BROKEN)
def test_invalid_values_in_a_configuration(tmp_path, change):
    made("ViTModel", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | BROKEN[change]))
    with pytest.raises(PatchloomError) as refusal:
        load_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 10**5, "\udcff", "x" * 2**21])
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_an_invalid_configuration(tmp_path, file, content):
    made("ViTModel", tmp_path)
    (tmp_path / file).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PatchloomError, match=f"{file} cannot be read as a configuration"):
        load_pretrained(tmp_path)


def test_a_small_file_does_not_make_a_large_net(tmp_path):
    """Sizes are inferred from weights, and few numbers can state large ones."""
    state = {"patch_embed.proj.weight": torch.zeros(1280, 1, 1, 1), "cls_token": torch.zeros(1, 1, 1280)}
    state |= {f"blocks.{i}.norm1.weight": torch.zeros(1280) for i in range(500)}
    state |= {"blocks.0.mlp.fc1.weight": torch.zeros(2, 1280), "blocks.0.ls1.gamma": torch.zeros(1280)}
    state |= {"pos_embed": torch.zeros(1, 2, 1280), "mask_token": torch.zeros(1, 1280)}
    with pytest.raises(PatchloomError, match="holds fewer weights than"):
        load_pretrained(written(tmp_path / "bomb.safetensors", state))


def test_an_export_is_read_again_by_every_verb(tmp_path, small_run):
    exported = patchloom.export(small_run("mae"), to="hf", out=tmp_path / "hf").weights
    vit, card = patchloom.load_encoder(exported)
    source, own = patchloom.load_encoder(small_run("mae"))
    images = torch.randn(2, own.spec.channels, *own.spec.img_size)
    with torch.inference_mode():
        assert torch.equal(vit.forward_features(images), source.forward_features(images))
    assert (card.mean, card.std) == (own.mean, own.std)
    teacher = build_task({"name": "distill", "features_of": str(exported)}, source).questions["features"].teacher
    assert torch.equal(teacher.encoder.state_dict()["norm.weight"], source.state_dict()["norm.weight"])
    again = patchloom.export(exported, out=tmp_path / "timm.safetensors")
    assert again.difference < 1e-5
    report = patchloom.evaluate("knn", exported, "digits", device="cpu", max_train=100, ks=(1,))
    assert report.quoted[0].encoder == "hf"
