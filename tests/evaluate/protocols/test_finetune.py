"""Fine-tuning learns, is honest about the test images, and gives a file that says the same again."""

import csv
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos

from patchloom import display
from patchloom.cli import main
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import features, settings, training
from patchloom.evaluate.classifier import Classifier, load_classifier, read_classifier, variant_of
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.results import Report
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Trained
from patchloom.evaluate.training import Candidate, Training, fit, plan_for, predict_classes, temporary_seed
from patchloom.nets import performance
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.encode import grid_size, patch_positions
from patchloom.nets.finetune import RelativeAttention, with_variant

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
# wider than high, so that rows and columns are not confused
SPEC = EncoderSpec("nano", (8, 12), 4, channels=1, options=SMALL)
IMAGES = torch.randn(3, 1, 8, 12, generator=torch.Generator().manual_seed(0))
QUICK = {"device": "cpu", "epochs": 2, "flip": False}


def encoder(**changes) -> tuple:
    torch.manual_seed(1)
    spec = replace(SPEC, **changes)
    return build_encoder(spec).eval(), EncoderCard(spec, (0.0,), (1.0,), "mae", "small")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with an encoder for digits of 8 x 8."""
    vit, card = encoder(img_size=(8, 8))
    save_encoder(vit, card, tmp_path / "run" / "encoder.safetensors")
    return tmp_path / "run"


@pytest.mark.parametrize("options", [{}, {"class_token": False}, {"reg_tokens": 2}, {"no_embed_class": True}])
@pytest.mark.parametrize("positions", ["sincos", "learned", "none"])
def test_keep_is_the_encoder_itself(options: dict, positions: str) -> None:
    vit, card = encoder(options=SMALL | options, positions=positions)
    copy = with_variant(vit, card, drop_path=0.5).eval()
    tokens = vit.forward_features(IMAGES)
    assert torch.equal(copy.forward_features(IMAGES), tokens)
    trained = {name for name, weight in vit.named_parameters() if weight.requires_grad}
    assert {name for name, weight in copy.named_parameters() if weight.requires_grad} == trained
    if vit.has_class_token:
        torch.testing.assert_close(Classifier(copy, 5, "class").eval().pooled(IMAGES), tokens[:, 0])


def test_the_mean_is_normed_afterwards() -> None:
    vit, card = encoder()
    seen = []
    vit.norm.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    vit.forward_features(IMAGES)
    expected = torch.nn.functional.layer_norm(seen[0][:, 1:].mean(1), (32,), eps=vit.norm.eps)
    torch.testing.assert_close(Classifier(with_variant(vit, card), 5, "mean").eval().pooled(IMAGES), expected)


def test_a_fresh_norm_knows_nothing_of_the_encoders() -> None:
    """MAE's program: mean of the patch tokens before the last norm, then a norm that begins at one and zero."""
    vit, card = encoder()
    torch.nn.init.normal_(vit.norm.weight)
    seen = []
    vit.norm.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    vit.forward_features(IMAGES)
    expected = torch.nn.functional.layer_norm(seen[0][:, 1:].mean(1), (32,), eps=1e-6)
    copy = with_variant(vit, card)
    torch.testing.assert_close(Classifier(copy, 5, "mean", fresh_norm=True).eval().pooled(IMAGES), expected)
    assert not Classifier(copy, 5, "mean").eval().pooled(IMAGES).allclose(expected, atol=0.1)


@pytest.mark.parametrize("class_token", [True, False])
def test_relative_positions_begin_as_none_and_are_timms(class_token: bool) -> None:
    vit, card = encoder(options=SMALL | {"class_token": class_token, "qk_norm": True})
    relative = with_variant(vit, card, "relative").eval()
    tokens = relative.forward_features(IMAGES)
    torch.testing.assert_close(tokens, with_variant(vit, card, "none").eval().forward_features(IMAGES))
    tables = [weight for name, weight in relative.named_parameters() if name.endswith("position_bias_table")]
    assert len(tables) == 2 and all(table.requires_grad and not table.any() for table in tables)
    for table in tables:
        torch.nn.init.normal_(table)
    stock = VisionTransformerRelPos(
        (8, 12), 4, 1, 0, "", 32, 2, 2, qk_norm=True, init_values=None, class_token=class_token, rel_pos_type="bias"
    ).eval()
    assert all(type(block.attn) is RelPosAttention for block in stock.blocks)
    stock.load_state_dict(relative.state_dict(), strict=True)
    biased = relative.forward_features(IMAGES)
    torch.testing.assert_close(biased, stock.forward_features(IMAGES))
    assert (biased - tokens).abs().max() > 0.01
    with torch.autocast("cpu", torch.bfloat16):
        assert (relative.forward_features(IMAGES).float() - biased).abs().max() < 0.2
    unfused = with_variant(vit, card, "relative").eval()
    unfused.load_state_dict(relative.state_dict())
    for module in unfused.modules():
        if isinstance(module, RelativeAttention):
            module.fused_attn = False
    torch.testing.assert_close(unfused.forward_features(IMAGES), biased)


def test_positions_that_are_given() -> None:
    without, card = encoder(positions="none", options=SMALL | {"class_token": False})
    with_, other = encoder()
    sincos = patch_positions(with_)
    assert (variant_of("auto", without), variant_of("auto", with_), variant_of("none", with_)) == (
        *("learned", "keep", "none"),
    )
    fixed = with_variant(without, card, "fixed", class_token=True)
    assert torch.equal(patch_positions(fixed), sincos) and not fixed.pos_embed.requires_grad
    assert fixed.has_class_token and not fixed.pos_embed[0, 0].any() and fixed.cls_token.std() < 0.05
    learned = with_variant(without, card, "learned")
    assert learned.pos_embed.requires_grad and 0.01 < learned.pos_embed.std() < 0.03
    on = with_variant(with_, other, "learned")
    assert torch.equal(on.pos_embed, with_.pos_embed) and on.pos_embed.requires_grad
    assert with_variant(with_, other, "none").pos_embed is None
    unchanged = with_variant(*encoder(options=SMALL | {"class_token": False}), "keep", class_token=True)
    assert torch.equal(patch_positions(unchanged), sincos) and not unchanged.pos_embed[0, 0].any()
    assert [block.drop_path1.drop_prob for block in with_variant(with_, other, drop_path=0.25).blocks[1:]] == [0.25]
    with pytest.raises(PatchloomError, match="relative positions cannot be given to register tokens"):
        with_variant(*encoder(options=SMALL | {"reg_tokens": 2}), "relative")
    with pytest.raises(PatchloomError, match="divisible by 4, not 30"):
        narrow = {"embed_dim": 30, "num_heads": 2, "depth": 1}
        with_variant(*encoder(positions="none", options=narrow), "fixed")


def test_an_encoder_of_timms_own_can_be_varied() -> None:
    name = "vit_tiny_patch16_224"
    vit = timm.create_model(name, num_classes=0).eval()
    card = EncoderCard(None, (0.5,) * 3, (0.5,) * 3, f"timm:{name}", name)
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(with_variant(vit, card).eval()(images), vit(images))
    assert grid_size(with_variant(vit, card, "relative")) == (14, 14)


class Ramps(Source):
    """Noise, and light from one of four sides, which is the class."""

    name, classes = "ramps", ("a", "b", "c", "d")

    def __init__(self, n: int, seed: int):
        self.labels = np.arange(n) % 4
        self.noise = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 55

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> torch.Tensor:
        ramp = torch.linspace(0, 200, 8).expand(8, 8)
        return (self.noise[i] + ramp.rot90(int(self.labels[i]))).to(torch.uint8)

    def fingerprint(self) -> str:
        return "0" * 16


@pytest.mark.parametrize("recipe", ["small", "mp3"])
def test_it_learns_what_can_be_learnt(run: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Ramps(48, 0), Ramps(40, 1)))
    lighter = {"batch_size": 24, "mixup": 0.0, "cutmix": 0.0, "randaugment": 0.0, "crop_scale": 0.9}
    options = {"epochs": 16, **(lighter | {"blr": 0.04} if recipe == "mp3" else {"blr": 0.1})}
    report = evaluate("finetune", run, "ramps", recipe=recipe, **QUICK | options)
    assert [row.encoder for row in report.rows] == ["small", "from scratch", "best constant"]
    assert all(row.value > 0.8 for row in report.quoted) and report.rows[-1].value == 0.25
    assert report.headline.startswith(f"Fine-tuning ({recipe}): ")
    assert report.rows[0].pooling == ("class" if recipe == "mp3" else "mean")


def _tuned(run: Path, **options) -> Report:
    return evaluate("finetune", run, "digits", **QUICK | {"control": False} | options)


def test_the_rate_is_chosen_without_a_look_at_the_test_images(run: Path, record_reads, monkeypatch) -> None:
    tried, before = [], Training.__init__

    def watched(self, model, source, recipe, *rest, **options):
        tried.append((len(source), recipe.blr))
        before(self, model, source, recipe, *rest, **options)

    monkeypatch.setattr(Training, "__init__", watched)
    record = record_reads(120, 60)
    honest = _tuned(run, blr=[0.02, 1e-4])
    settings = honest.rows[0].settings
    assert tried == [(108, 1e-4), (108, 0.02), (120, settings["blr"])]
    assert record.count("test") == 60 and set(record[: record.index("test")]) == {"train"}
    assert set(record[record.index("test") :]) == {"test"}
    assert settings["held_out"] == 12 and 0 <= settings["held_out_accuracy"] <= 1
    assert "for each model separately on a stratified 10%" in honest.protocol

    record_reads(120, 60, np.random.default_rng(0).permutation(open_data("digits").test.labels[:60]))
    blind = _tuned(run, blr=[0.02, 1e-4])
    assert blind.rows[0].settings == settings and tried[3:] == tried[:3]


def test_the_best_rate_is_chosen_and_of_equals_the_lowest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit, card = load_encoder_file(run)
    source = open_data("digits").train.subset(range(60))
    plan = plan_for("small", {"blr": [0.4, 0.1, 0.2, 0.3]}, vit, card, source, EvalSettings(device="cpu"), "float32")
    shares, done = iter((0.3, 0.7, 0.7, 0.1)), []

    def train(model, images, plan, name, left):
        done.append((plan.recipe.blr, len(images)))
        return Trained(model, {})

    monkeypatch.setattr(training, "train_classifier", train)
    monkeypatch.setattr(
        training, "predict_classes", lambda *given, **how: SimpleNamespace(accuracy=lambda: next(shares))
    )
    _, settings = fit(Candidate("one", lambda recipe: None, {"positions": "keep"}), plan, source)
    assert done == [(0.1, 54), (0.2, 54), (0.3, 54), (0.4, 54), (0.2, 60)]
    assert settings.items() >= {"blr": 0.2, "held_out_accuracy": 0.7, "held_out": 6, "positions": "keep"}.items()


def test_one_seed_one_result(run: Path, record_reads) -> None:
    record_reads(64, 40)
    same = {"recipe": "mae", "batch_size": 16, "epochs": 1, "blr": 0.02, "erasing": 0.5}
    torch.manual_seed(1)
    first = _tuned(run, **same)
    one = _weights(run)
    again = _tuned(run, **same)
    assert again.rows == first.rows and _weights(run) == one
    _tuned(run, **same | {"seed": 1})
    assert len(_weights(run)) == 2 and len(set(_weights(run).values())) == 2
    both = _tuned(run, **same | {"seeds": 2, "from_scratch": True})
    assert len(both.others) == 1 and both.rows[0].encoder == "from scratch" and len(_weights(run)) == 2


def test_nothing_outside_notices_a_training() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with temporary_seed(2**40):
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    with temporary_seed(2**40):
        assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())


def _weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "finetuned").iterdir())}


@pytest.mark.parametrize("positions", ["auto", "relative"])
def test_what_is_saved_says_the_same_again(run: Path, tmp_path: Path, positions: str) -> None:
    out = tmp_path / "my.safetensors"
    new = {"fresh_norm": positions == "auto", "train_positions": positions == "auto"}
    report = _tuned(run, positions=positions, pooling="class", max_train=60, blr=0.05, out=str(out), **new)
    model, card = load_classifier(out)
    assert (model.norm is not None) == card.fresh_norm == (positions == "auto")
    data = open_data("digits")
    found = predict_classes(model, data.test, card.encoder, EvalSettings(device="cpu"))
    assert found.accuracy() == report.rows[0].value and not model.training
    assert (card.classes, card.data, card.seed, card.pooling) == (data.test.classes, "digits", 0, "class")
    assert card.positions == {"auto": "keep"}.get(positions, positions) == card.settings["positions"]
    assert card.settings["blr"] == 0.05 and card.test == data.test.fingerprint() and card == read_classifier(out)
    assert not (run / "finetuned").exists()


def test_what_is_interrupted_leaves_nothing_and_begins_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, done = Training.update, []

    def interrupted(self, *given):
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _tuned(run, max_train=40)
    assert [path.name for path in run.iterdir()] == ["encoder.safetensors"]
    assert _tuned(run, max_train=40).n_test == 360 and [*_weights(run)] == ["digits-small-0.safetensors"]


def test_the_command_line_from_end_to_end(run: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["finetune", str(run), "digits", "--epochs", "1", "--max_train", "40", "--positions", "learned"]
    words += ["--device", "cpu"]
    assert main(["evaluate", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        *("small: trained for 1 epoch, ", "saved as", "positions: learned. From scratch is the same"),
        *(
            "Trained on 40 images with the recipe small: epochs 1, warmup epochs 0.1, batch 8, blr 0.004,",
            "best constant",
            "on 360 test images.",
        ),
    ):
        assert part in printed
    with open(run / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["encoder"] for row in rows] == ["small", "from scratch", "best constant"]
    assert {row["protocol"] for row in rows} == {"finetune"}
    assert main(["evaluate", *words, "--mixup", "0.8", "--batch_size", "7"]) == 2
    assert "use --batch_size 8" in capsys.readouterr().err


def test_wrong_pairs_are_refused_in_a_sentence(run: Path, tmp_path: Path, record_reads) -> None:
    for options, said in (
        ({"max_train": 9}, "9 training images are too few for 10 classes"),
        ({"positions": "rotary"}, "--positions cannot be rotary"),
        ({"control": "no"}, "--control cannot be no: it takes true or false"),
        ({"from_scratch": True, "out": "here"}, "--from_scratch saves no classifier"),
        ({"blr": []}, "--blr has no rate"),
        ({"blr": [1e-3, -1.0]}, "--blr must be"),
        ({"recipe": "dino"}, "no recipe dino"),
        ({"out": "here", "seeds": 2}, "--out names one file, but --seeds 2"),
        ({"train_positions": True, "positions": "fixed"}, "--positions fixed has no .* leave out --train_positions"),
        ({"epochz": 1}, "there is no option --epochz; did you mean --epochs"),
    ):
        with pytest.raises(PatchloomError, match=said):
            _tuned(run, **options)
    vit, card = encoder(channels=5, img_size=(8, 8))
    save_encoder(vit, card, tmp_path / "five.safetensors")
    with pytest.raises(PatchloomError, match="another number of channels"):
        _tuned(tmp_path / "five.safetensors", max_train=40)
    vit, card = encoder(model="swin-nano", img_size=(32, 32), patch_size=4, channels=1, options={}, positions="none")
    save_encoder(vit, card, tmp_path / "swin.safetensors")
    with pytest.raises(PatchloomError, match="has no position embeddings to train: leave out --train_positions"):
        _tuned(tmp_path / "swin.safetensors", train_positions=True)
    record_reads(30, 20)
    one = settings.open_data("digits").train
    one.labels = np.zeros(30, np.int64)
    with pytest.raises(PatchloomError, match="images of one class only"):
        _tuned(run)


def test_a_loss_that_is_no_number_stops_it(run: Path) -> None:
    vit, card = load_encoder_file(run)
    source = open_data("digits").train.subset(range(20))
    plan = plan_for("small", {"epochs": 1}, vit, card, source, EvalSettings(device="cpu"), "float32")
    with torch.no_grad():
        vit.norm.weight[0] = torch.nan
    candidate = Candidate("bad", lambda recipe: Classifier(with_variant(vit, card), 10, "mean"), {})
    with pytest.raises(PatchloomError, match="not finite after 1 steps: lower --blr"):
        fit(candidate, plan, source)


def test_the_time_of_all_trainings_is_said_before_they_begin(run: Path, capsys: pytest.CaptureFixture) -> None:
    _tuned(run, max_train=160, control=True, epochs=10)
    first, *others = capsys.readouterr().out.splitlines()
    # 136 images in steps of 16, the other 24 are for validation
    said = r"Training small, then from scratch: 10 epochs of 8 steps each\. This takes about \d+ s"
    assert re.match(said, first) and "was best" in others[0] and "of 24 validation images" in others[0]


def test_the_line_has_the_time_left_of_all_trainings(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, step = [], Training.update

    def watched(self, *given):
        lines.append(display._status_thread.under_way[-1].line())
        return step(self, *given)

    monkeypatch.setattr(Training, "update", watched)
    _tuned(run, max_train=40, control=True, epochs=3)
    assert len(lines) == 30 and lines[0].endswith("s left · small · the first step")
    assert re.fullmatch(r"\d+ s left · small · epoch 0\.2/3 · loss \d\.\d{3}", lines[1])
    assert re.fullmatch(r"\d+ s left · from scratch · epoch 2\.8/3 · loss \d\.\d{3}", lines[-1])


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_auto_is_bfloat16_where_that_is_faster(run: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(features, "bfloat16_pays", lambda: (True, "here"))
    seen, chosen = set(), []
    monkeypatch.setattr(training, "choose_kernels", lambda vit, *how: chosen.append(how) or ("torch", ""))
    forward = Classifier.forward

    def watched(self, images):
        seen.add((self.training, torch.is_autocast_enabled("cpu")))
        return forward(self, images)

    monkeypatch.setattr(Classifier, "forward", watched)
    report = _tuned(run, max_train=40, precision=asked)
    half = asked == "auto"
    # the test is in float32, as it is for whoever loads the classifier
    assert report.rows[0].settings["precision"] == ("bfloat16" if half else "float32")
    assert seen == {(True, half), (False, False)} and chosen == [("cpu", half, 8)]


def test_native_kernels_train_as_torchs_do(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := performance.missing_kernels("native"):
        pytest.skip(reason)
    monkeypatch.setattr(features, "bfloat16_pays", lambda: (True, "here"))
    native, used = performance.NATIVE, []

    def noting(*given, **options):
        used.append(kernels)
        return native.compute(*given, **options)

    monkeypatch.setattr(performance, "NATIVE", native._replace(compute=noting))
    for kernels in ("torch", "native"):
        monkeypatch.setattr(training, "choose_kernels", lambda *given, kernels=kernels: (kernels, ""))
        report = _tuned(run, max_train=40, out=str(run / f"{kernels}.safetensors"))
        assert report.n_test == 360
    steps, blocks = 10, len(load_encoder_file(run)[0].blocks)
    assert used == ["native"] * steps * blocks  # the test is in float32
    one, other = (load_classifier(run / f"{name}.safetensors")[0].state_dict() for name in ("torch", "native"))
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=5e-3, rtol=0.1)
