"""Tests of early errors: options of other formats, and missing libraries."""

import sys

import pytest

from patchloom.errors import PatchloomError
from patchloom.export.export import export


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "timm", "fp16": True}, "--fp16 is only for --to onnx: leave it out with --to timm"),
        ({"to": "hf", "fp16": True}, "--fp16 is only for --to onnx: leave it out with --to hf"),
        ({"to": "onnx", "license": "mit"}, "--license is only for --to hf: leave it out with --to onnx"),
        ({"push": "me/it"}, "--push is only for --to hf: leave it out with --to timm"),
        ({"to": "hf", "public": True}, "--public needs --push"),
        ({"to": "hf", "license": "My own!"}, "--license My own! is not an identifier"),
        ({"to": "hf", "push": "a b"}, "--push a b is not a repository name"),
        ({"to": "keras"}, "--to keras is not a format: choose from timm, hf or onnx"),
        ({"pooling": "max"}, "--pooling cannot be max: it takes class, mean, prefix, both or instance"),
    ],
)
def test_options_of_another_form(options, said):
    with pytest.raises(PatchloomError, match=said):
        export("nowhere", **options)


@pytest.mark.parametrize(("to", "library"), [("hf", "transformers"), ("onnx", "onnxruntime"), ("onnx", "onnxscript")])
def test_a_missing_extra_is_a_sentence(to, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PatchloomError, match=rf"--to {to} needs {library}: pip install '"):
        export("nowhere", to=to)


@pytest.mark.parametrize("to", ["hf", "onnx"])
def test_recordings_go_to_timm_alone(to, tmp_path):
    from patchloom.audio.config import Sound
    from patchloom.nets.build import EncoderSpec, build_encoder
    from patchloom.nets.checkpoints.format import EncoderCard, save_encoder

    sound = Sound()
    spec = EncoderSpec("nano", sound.size, (sound.bins, 1), 1, options={"embed_dim": 32, "depth": 1})
    card = EncoderCard(spec, (0.5,), (0.2,), "mae", "tones", sound=sound)
    save_encoder(build_encoder(spec), card, tmp_path / "e.safetensors")
    with pytest.raises(PatchloomError, match="only encoders of images: use --to timm"):
        export(tmp_path / "e.safetensors", to=to)
