"""Tests of the folder for the Hub: loading with timm and transformers, and a model card without paths."""

import json
import re
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import yaml
from exporting import a_run, photographs
from refusing import refusal
from safetensors.torch import load_file

from patchloom.data.loader import plain_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.export import to_hub
from patchloom.export.encoder import load_exportable
from patchloom.export.export import export
from patchloom.export.model_card import model_card
from patchloom.nets.checkpoints.format import load_encoder_file
from patchloom.report.results import escape_markdown
from patchloom.results.result import Result
from patchloom.runs.folder import RunFolder, data_slug

DINOV3 = "https://github.com/facebookresearch/dinov3/blob/main/LICENSE.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secret-project")
    images = photographs(folder / "pipe | <b>star*")
    results = [
        Result("accuracy", value, 0.4, 0.6, 100, name, "knn", {"k": 20}, data=f"{folder}/labels of mine", quoted=True)
        for name, value in (("run", 0.5), ("untrained", 0.3))
    ]
    return a_run(folder / "run_*x*", images, results, reg_tokens=1, init_values=0.1)


@pytest.fixture(scope="module")
def done(run: Path):
    return export(run, to="hf", license="cc-by-4.0")


def features(run: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vit, card = load_encoder_file(run)
    (images,) = next(plain_batches(open_data(str(next(run.parent.glob("pipe*")))).train, (16, 16), 16)).views
    images = normalize(images, card.mean, card.std)
    with torch.inference_mode():
        tokens = vit.forward_features(images)
    return images, tokens, tokens[:, vit.num_prefix_tokens :].mean(1)


def test_timm_builds_it_from_the_folder_alone(run, done):
    assert {one.name for one in done.weights.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    model = timm.create_model(f"local-dir:{done.weights}", pretrained=True).eval()
    images, tokens, vectors = features(run)
    with torch.inference_mode():
        assert (model.forward_features(images) - tokens).abs().max() < 1e-5
        assert (model(images) - vectors).abs().max() < 1e-5 and vectors.std() > 0.1
    config = timm.data.resolve_model_data_config(model)
    _, card = load_encoder_file(run)
    assert config["input_size"] == (3, 16, 16) and (*config["mean"],) == card.mean
    assert (*config["std"],) == card.std
    assert config["interpolation"] == "bicubic" and config["crop_pct"] == 1 and config["crop_mode"] == "center"
    assert load_file(done.weights / "model.safetensors").keys() == load_encoder_file(run)[0].state_dict().keys()


def test_transformers_loads_the_same(run, done):
    from transformers import AutoImageProcessor, TimmWrapperModel

    model = TimmWrapperModel.from_pretrained(done.weights).eval()
    images, tokens, vectors = features(run)
    with torch.inference_mode():
        output = model(images)
    assert (output.last_hidden_state - tokens).abs().max() < 1e-5
    assert (output.pooler_output - vectors).abs().max() < 1e-5
    assert AutoImageProcessor.from_pretrained(done.weights).data_config["input_size"] == (3, 16, 16)


def test_the_printed_code_and_its_difference(done):
    assert done.difference < 1e-5 and "timm's and transformers' features differ" in done.sentence()
    numbers = [float(one) for one in re.findall(r"by (?:at most )?(\d\.\de[-+]\d+) by", done.checks[0])]
    assert len(numbers) == 2 and max(numbers) < 1e-5
    assert 0.9 < float(re.search(r"cosine similarity (\S+) or more", done.checks[1])[1]) <= 1
    found: dict = {}
    exec(done.snippet, found)
    assert "local-dir:" in done.snippet and callable(found["embed"])


def test_the_card_tells_no_path_and_nothing_in_it_is_markup(run, done):
    card = (done.weights / "README.md").read_text()
    assert "secret-project" not in card and str(run.parent) not in card and "<b>" not in card
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "cc-by-4.0" and yaml.safe_load(front)["library_name"] == "timm"
    assert "| knn, accuracy (%) | this encoder | 50.0 \\[40.0, 60.0\\] |" in text
    assert "|  | untrained | 30.0 \\[40.0, 60.0\\] |" in text
    assert "Settings: k = 20. Data (tested): labels-of-mine (100)." in text
    assert "- **epochs**: " in text and "task `mae` (He et al. 2022" in text
    (title,) = re.findall(r"^# (.*)$", text, re.MULTILINE)
    assert title == escape_markdown("run_*x*") == r"run\_\*x\*"
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(codes) == 2 and "hf-hub:NAME/run_-x-'" in codes[0] and "transformers" in codes[1]
    for code in codes:
        compile(code, "README.md", "exec")


def card_of(run: Path, given: str | None = None, blend: float | None = None, **changes: str) -> str:
    one = load_exportable(run, "mean")
    return model_card(run, replace(one, blend=blend, card=replace(one.card, **changes)), given, None, 0.0, True)


def test_a_card_has_notes_without_paths_and_the_name_of_its_repository(run):
    text = card_of(run, note=f"The run {run} stopped after epoch 2 of 3.")
    training = text.partition("## Training")[2].partition("##")[0]
    assert f"- **weights**: The run {escape_markdown(data_slug(run))} stopped after epoch 2 of 3.\n" in training
    assert str(run.parent) not in text and "**weights**" not in card_of(run)
    assert escape_markdown("a\n\n# b | `c` [d](e) <f>") == r"a \# b \| \`c\` \[d\](e) \<f\>"
    card = model_card(run, load_exportable(run, "mean"), None, "me/photos-mae", 0.0, True)
    assert "\n# photos-mae\n" in card and "'hf-hub:me/photos-mae'" in card


def test_what_is_not_the_same_is_not_written(run, tmp_path, monkeypatch):
    saved = to_hub.save_for_hf

    def other(model, folder, **options):
        with torch.no_grad():
            model.get_parameter("norm.weight").mul_(1.5)
        saved(model, folder, **options)

    monkeypatch.setattr(to_hub, "save_for_hf", other)
    assert "features by timm differ by" in refusal(export, run, to="hf", out=tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_two_channels_and_class_tokens(tmp_path):
    """timm must use the weights and the pooling as they were exported."""
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.random.default_rng(i).integers(0, 256, (20, 20, 2), dtype=np.uint8))
    run = a_run(tmp_path / "run", tmp_path, positions="none")
    done = export(run, to="hf", pooling="class")
    model = timm.create_model(f"local-dir:{done.weights}", pretrained=True).eval()
    images = torch.randn(2, 2, 16, 16)
    vit, _ = load_encoder_file(run)
    with torch.inference_mode():
        assert (model(images) - vit.forward_features(images)[:, 0]).abs().max() < 1e-5
    config = json.loads((done.weights / "config.json").read_text())
    assert config["pretrained_cfg"]["first_conv"] is None and "num_classes" not in config["model_args"]
    assert "license: unknown" in (done.weights / "README.md").read_text() and "def vectors(images)" in done.snippet
    assert any("license: unknown" in note and "--license" in note for note in done.notes)


def test_the_licence_of_earlier_weights_is_mentioned(run, tmp_path, monkeypatch):
    assert not any("license" in note for note in export(run, to="hf", license="mit", out=tmp_path / "given").notes)
    settings = replace(RunFolder(run).read_config(), init="timm:vit_tiny_patch16_224")
    monkeypatch.setattr(RunFolder, "read_config", lambda self: settings)
    notes = export(run, to="hf", out=tmp_path / "hub").notes
    assert any("The licence of timm:vit_tiny_patch16_224 applies to these weights, too." in note for note in notes)


@pytest.mark.parametrize(
    ("license", "given", "header", "said"),
    [
        ("apache-2.0", None, {"license": "apache-2.0"}, "apache-2.0. It applies to these weights, too."),
        ("apache-2.0", "mit", {"license": "mit"}, "learnt from: apache-2.0."),
        ("unknown", None, {"license": "unknown"}, "check the weights' source"),
        ("my *own*", None, {"license": "other", "license_name": "my *own*"}, r"learnt from: my \\\*own\\\*"),
        (
            "mit AND dinov3-license",
            None,
            {"license": "other", "license_name": "mit AND dinov3-license", "license_link": DINOV3},
            f"dinov3-license. It applies to these weights, too. They may be passed on only under it, .*{DINOV3}",
        ),
    ],
)
def test_the_licence_of_the_start_is_in_the_card(run, license, given, header, said):
    card = card_of(run, given, license=license)
    front = yaml.safe_load(card.split("---")[1])
    assert {name: front[name] for name in front if name.startswith("license")} == header
    assert re.search(said, card.partition("## Licence\n")[2].partition("\n## ")[0])


def test_the_card_of_a_blend_has_no_figures_of_the_run(run):
    assert "## Figures" in card_of(run) and "## Licence" not in card_of(run)
    card = card_of(run, blend=0.5, note="The weights are 0.5 of the start (WiSE-FT).")
    assert "The weights are 0.5 of the start" in card and "## Figures" not in card and "## Verdict" not in card
    start = card_of(run, blend=0.0, task="timm:vit_x")
    assert "the weights of timm:vit\\_x with which a run began" in start and "## Training" not in start


def test_a_folder_with_other_files_is_left_alone(run, tmp_path):
    (tmp_path / "mine.txt").touch()
    for out, said in ((tmp_path, "other files, such as mine.txt"), (tmp_path / "mine.txt", "is a file")):
        assert said in refusal(export, run, to="hf", out=out)


# Uploads, with an API that only records requests.


FILES = ("config.json", "README.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*FILES, "notes.txt"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("public", [False, True])
def test_a_repository_is_made_and_filled(folder, monkeypatch, public):
    made, sent = {}, {}

    class Api:
        def create_repo(self, repo_id: str, **options) -> huggingface_hub.RepoUrl:
            made.update(options)
            return huggingface_hub.RepoUrl(f"https://huggingface.co/somebody/{repo_id}")

        def upload_folder(self, **options) -> None:
            assert made
            sent.update(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    address = to_hub.push(folder, FILES, "photos-mae", public)
    assert made["private"] is not public and made["exist_ok"] and address.endswith("huggingface.co/somebody/photos-mae")
    # by the name that the Hub gave it
    assert sent["repo_id"] == "somebody/photos-mae" and sent["allow_patterns"] == [*FILES]
    assert Path(sent["folder_path"]) == folder


def test_what_the_hub_refuses_is_a_sentence(folder, monkeypatch):
    class Refusing:
        def create_repo(self, *_, **__):
            raise OSError("403 Forbidden: you may not write there\nand much more")

    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    with pytest.raises(PatchloomError, match=r"not uploaded to a/b \(403 Forbidden: [^\n]*there\)"):
        to_hub.push(folder, FILES, "a/b", False)


def test_nothing_is_tried_that_would_fail(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    # the second is without its owner
    for name, said in (("a b", "not a repository"), ("photos-mae", "not a repository"), ("me/photos-mae", "token")):
        assert said in refusal(to_hub.check_push, name)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_nothing")
    monkeypatch.setattr(to_hub, "why_offline", lambda: "huggingface.co does not answer")
    assert "(huggingface.co does not answer)" in refusal(to_hub.check_push, "me/photos-mae")
    monkeypatch.setattr(to_hub, "why_offline", lambda: "")
    to_hub.check_push("me/photos-mae")
