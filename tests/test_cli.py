"""Command line: the main job on small data, and everything that can be typed wrongly."""

import shutil
from pathlib import Path

import pytest
import torch
from labelled import two_tones
from refusing import failed

import patchloom
from patchloom.cli import main
from patchloom.options.parse import parse_call, parse_pretrain
from patchloom.runs.settings import request
from patchloom.sizes import in_pixels

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = "--task mae --epochs 1 --model nano --model.embed_dim 32 --model.depth 1 --batch_size 16".split()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return two_tones(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["pretrain", str(photos), "--out", str(out), *QUICK]) == 0
    return out


def test_a_run_is_one_folder(run):
    for name in ("config.yaml", "metrics.csv", "log.txt", "encoder.safetensors", "checkpoints/last.safetensors"):
        assert (run / name).stat().st_size > 0
    drawn = {"curves.png", "recovered.png", "recovered.caption.json"}
    assert {path.name for path in (run / "pictures").iterdir()} == drawn
    log = (run / "log.txt").read_text()
    assert "patch_size" in log and "reconstruction error" in log and "by kNN" in log
    assert "broken.jpg" in (run / "unreadable.txt").read_text() and "1 file could not be read" in log


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_that_is_taken_hides_no_mistake(run, photos, capsys, tmp_path, finished):
    shutil.copytree(run, tmp_path / "run")
    if not finished:
        (tmp_path / "run" / "summary.txt").unlink()
    for words, said in (
        (["--task.mask_ratio", "2"], "--task.mask_ratio must be 0 or more and below 1, not 2"),
        (["--img_size", "33", "--patch_size", "8"], "patches of 8 pixels do not divide"),
    ):
        told = failed(capsys, "pretrain", photos, "--out", tmp_path / "run", *QUICK, *words)
        assert said in told and "other settings" not in told


def test_the_configuration_repeats_the_run(run, tmp_path):
    out = tmp_path / "again"
    assert main(["pretrain", "--config", str(run / "config.yaml"), "--out", str(out)]) == 0
    assert (out / "encoder.safetensors").read_bytes()[-1000:] == (run / "encoder.safetensors").read_bytes()[-1000:]


def test_evaluate_look_and_export(run, photos, capsys):
    assert main(["evaluate", "linear", str(run), str(photos)]) == 0
    printed = capsys.readouterr().out
    assert "untrained" in printed and "raw pixels" in printed and "best constant" in printed
    assert main(["look", str(run), str(photos)]) == 0
    assert Path(capsys.readouterr().out.strip()).exists()
    assert main(["export", str(run), "--to", "timm"]) == 0
    printed = capsys.readouterr().out
    names = {}
    exec(printed[printed.index("import timm") :], names)
    encoder, _ = patchloom.load_encoder(run)
    images = torch.randn(2, 3, *encoder.patch_embed.img_size)
    with torch.inference_mode():
        torch.testing.assert_close(names["encoder"].forward_features(images), encoder.forward_features(images))


def test_folders_without_images(capsys, tmp_path):
    for name, suffix in (("empty", ""), ("texts", "txt"), ("broken", "png")):
        (tmp_path / name).mkdir()
        for i in range(3 if suffix else 0):
            (tmp_path / name / f"{i}.{suffix}").write_text("no image")
    for name, word in (("nowhere", "nowhere"), ("empty", "empty"), ("texts", ".txt"), ("broken", "could be read")):
        assert word in failed(capsys, "pretrain", tmp_path / name, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pretrain shaps", "shapes"),
        ("pretrain shapes --epochs 0", "--epochs must be above 0 and at most 2,147,483,647, not 0"),
        ("pretrain shapes:50 --model resnet18", "resnet18 is timm's ResNet, and patchloom supports plain"),
        ("pretrain shapes:50 --model beit_base_patch16_224", "the nearest of these is vit_base_patch16_224"),
        (
            "pretrain shapes:50 --init timm:beit_base_patch16_224.in22k_ft_in22k",
            "is timm's Beit, and patchloom supports plain VisionTransformer, Eva and SwinTransformer only: the nearest "
            "of these is vit_base_patch16_224.augreg2_in21k_ft_in1k",
        ),
        ("pretrain shapes:50 --model vit_base_patch16_sapiens2", "random rotations in training"),
        ("pretrain shapes:50 --device cuda", "cuda"),
        ("pretrain shapes:50 --model dinov2", "did you mean vit_small_patch14_dinov2,"),
        ("pretrain shapes:50 --model qqqq", "no model is called qqqq. Choose nano,"),
        ("pretrain shapes:50 --init dinov2", "did you mean timm:vit_small_patch14_dinov2.lvd142m,"),
        ("evaluate knn timm:dinov2 digits", "did you mean timm:vit_small_patch14_dinov2.lvd142m,"),
        ("pretrain shapes --config nowhere.yaml", "nowhere.yaml cannot be read"),
        ("export nowhere --to keras", "--to keras is not a format"),
        ("tasks mae", "takes no arguments"),
    ],
)
def test_wrong_words_give_one_sentence(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in failed(capsys, *words.split())
    assert not any(tmp_path.iterdir()), "nothing may be left behind"


def test_a_similar_path_is_suggested(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "runs/photos-droppos"):
        Path(name).mkdir(parents=True)
    Path("runs/photos-droppos/config.yaml").touch()
    assert "did you mean photos?" in failed(capsys, "pretrain", "photo")
    assert "did you mean runs/photos-droppos?" in failed(capsys, "look", "runs/photos-dropos")
    assert "did you mean runs/photos-droppos?" in failed(capsys, "export", "runs/photo-droppos")


def test_configuration_files(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: shapes\nimg-size: 64\nepochs: 4\ntask: {name: droppos, sigma: 0.5}")
    given, _ = parse_pretrain(["--config", str(file), "--epochs", "3"])
    assert (given["data"], given["task"]["name"], given["task"]["sigma"]) == ("shapes", "droppos", 0.5)
    assert (given["img_size"], given["epochs"]) == ((64, 64), 3)
    given, _ = parse_pretrain(["digits", "--config", str(file), "--task.sigma", "0.25"])
    assert (given["data"], given["task"]["sigma"], given["epochs"]) == ("digits", 0.25, 4)


def test_sides_of_patches(tmp_path):
    file = tmp_path / "run.yaml"
    assert [in_pixels(one) for one in (8, (40, 1), [32, 32], "auto")] == ["8", "40x1", "32x32", "auto"]
    for typed, size in {"40x1": (40, 1), "[40, 1]": (40, 1), "8x8": 8, "8": 8}.items():
        file.write_text(f"patch_size: {typed}")
        for words in (["--patch_size", typed], ["--config", str(file)]):
            given, _ = parse_pretrain(["shapes", "--img_size", "40x98", *words])
            asked = request(given.pop("data"), given.pop("task"), given)
            assert (asked.img_size, asked.patch_size) == ((40, 98), size)
        for verb in ("check", "bench"):
            assert parse_call(verb, ["shapes", f"--patch_size={typed}"])["patch_size"] in (size, (8, 8))


def test_several_words_are_several_data(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: [a, 'b,c']\nheld_out: auto\ngroup: parent\n")
    for words, data in (
        (["a", "--task", "mae", "b"], ["a", "b"]),
        (["a,b"], "a,b"),
        (["12"], "12"),
        (["--config", str(file)], ["a", "b,c"]),
        (["--config", str(file), "d"], "d"),
    ):
        given, _ = parse_pretrain(words)
        assert given["data"] == data
        assert (given["held_out"], given["group"]) == ("auto", "parent" if str(file) in words else None)
    for words, data in ((["d"], "d"), (["d", "--seeds", "2", "e"], ["d", "e"]), (["12"], "12")):
        assert parse_call("evaluate", ["knn", "run", *words])["data"] == data
    assert parse_call("check", ["a", "b", "--images", "3"])["data"] == ["a", "b"]
    assert parse_call("check", ["12"])["data"] == "12"


def test_several_trackers_are_not_taken_for_data():
    for words, log, data in (
        ("d --log tensorboard wandb", "tensorboard,wandb", "d"),
        ("--log=wandb mlflow tensorboard d e", "wandb,mlflow,tensorboard", ["d", "e"]),
        ("--log wandb,mlflow trackio --epochs 2 d", "wandb,mlflow,trackio", "d"),
        ("--log wandb d mlflow", "wandb", ["d", "mlflow"]),
        ("wandb --log mlflow", "mlflow", "wandb"),
        ("d --log wandb ./mlflow", "wandb", ["d", "./mlflow"]),
    ):
        given, _ = parse_pretrain(words.split())
        assert (given["log"], given["data"]) == (log, data)


def test_several_sources_get_the_options_of_their_task(tmp_path):
    (file := tmp_path / "run.yaml").write_text("data: [shapes:20, photos]\n")
    for words, task in ((["shapes:20", "photos"], "mae"), (["--config", str(file)], "mae"), (["shapes:20"], "droppos")):
        given, _ = parse_pretrain(words)
        data, chosen = given.pop("data"), given.pop("task")
        assert request(data, chosen, given).task["name"] == task
        assert request([data] if isinstance(data, str) else data, "auto", {}).task["name"] == task


def test_a_pattern_is_not_changed():
    for group in ("^(.*)_", "parent", "([^/]+)_", "[A-Z]+", "0016", "*x", "{a}", "a: b", r"\d\D*$"):
        assert parse_pretrain(["a", "--group", group])[0]["group"] == group
        assert parse_call("evaluate", ["knn", "r", "d", "--group", group])["group"] == group
        assert parse_call("check", ["d", "--group", group])["group"] == group
