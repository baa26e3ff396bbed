"""Recipes: they agree with their files, the page and the papers; options override them; runs resume."""

import re
import shlex
from dataclasses import replace
from importlib.resources import files

import pytest
from killing import typed
from resolved import VALUES

from patchloom.check import check
from patchloom.cli import main
from patchloom.data.stats import Stats, unknown_stats
from patchloom.evaluate.recipes import RECIPES
from patchloom.nets.build import outline
from patchloom.options.parse import parse_call, parse_pretrain
from patchloom.recipes import recipe_named, recipe_names
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings, request
from patchloom.tasks import build_task
from patchloom.tasks.task import Task
from patchloom.train.plan import describe_recipe, effective
from patchloom.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("quick_probe")
NAMES = recipe_names()
PAPERS = {  # images per update, base rate and warm-up; the page of recipes has models, epochs and scores
    "mae-vit-b": (4096, 1.5e-4, 40),  # and its rows with which other papers compare
    "simmim-vit-b": (2048, 5e-5, 10),
    "crossmae-vit": (4096, 5e-5, 40),
    "data2vec2-vit-b": (256, 1e-3, 10),
    "droppos-vit-b": (4096, 1.5e-4, 10),
    "droppos-vit-l": (4096, 1.5e-4, 40),
    "mp3-vit": (2048, 2.5e-4, 5),
    "mp3-cifar100": (256, 2.5e-4, 5),
    "mp3-tiny-imagenet": (512, 2.5e-4, 5),
    "jigsaw-vit-s": (1024, 2.5e-4, 5),
    "part-vit-b": (1024, 3.125e-5, 20),
    "part-cifar100": (512, 2.5e-4, 20),
    "loca-vit-b": (1024, 2.5e-4, 15),
    "restore-vit": (2048, 1.5e-4, 20),
    "extrema-vit": (2048, 1.5e-4, 40),
    "extrema-vit-b-22k": (2048, 1.5e-4, 4),
    "extrema-vit-s-22k": (2048, 1.5e-4, 4),
    "lut-": (4096, 1.5e-4, 40),
}
PIXIO = {"mask_ratio": 0.75, "mask_unit": 64, "decoder_width": 512, "decoder_heads": 16}
OPTIONS = {  # of the task, by which rows of a paper differ
    "droppos-vit-b": {"mask_ratio": 0.75, "position_mask_ratio": 0.75, "sigma": 1.0, "temperature": 0.1},
    "mp3-cifar100": {"context_mask_ratio": 0.5},
    "mp3-tiny-imagenet": {"context_mask_ratio": 0.8},
    "mp3-vit-b": {"context_mask_ratio": 0.75},
    "jigsaw-vit-s": {"mask_ratio": 0.5},
    "part-vit-b": {"pairs": 4802, "head": "linear", "context_mask_ratio": 0.0},
    "part-cifar100": {"pairs": 2048, "head": "attention", "context_mask_ratio": 0.0},
    "loca-vit-b": {"mask_ratio": 0.64, "context_ratio": 0.2, "momentum": 0.996},
    "restore-vit-b": {"degradation": "zoom_in", "mask_ratio": 0.75, "canvas": 320, "band_weight": 0.2},
    "restore-vit-b-masked": {"degradation": "masked", "mask_ratio": 0.75, "sampling": "random"},
    "restore-vit-b-zoom-in": {"degradation": "zoom_in", "mask_ratio": 0.0, "scale": 0.7143},  # 160 of 224
    "restore-vit-b-zoom-in-320": {"degradation": "zoom_in", "mask_ratio": 0.0, "canvas": 320},
    "restore-vit-b-fisheye-288": {"degradation": "fisheye", "mask_ratio": 0.0, "twist": [0.2, 0.25], "canvas": 288},
    "restore-vit-l": {"degradation": "zoom_in", "mask_ratio": 0.75, "canvas": 320, "band_weight": 0.2},
    "restore-vit-b-zoom-out": {"degradation": "zoom_out", "mask_ratio": 0.0, "scale": 160 / 224},
    "restore-vit-b-fisheye": {"degradation": "fisheye", "mask_ratio": 0.0, "twist": [0.2, 0.25]},
    "restore-vit-b-blur": {"degradation": "blur", "mask_ratio": 0.0, "kernel": 9},
    "restore-vit-b-decolorize": {"degradation": "decolorize", "mask_ratio": 0.0, "saturation": 0.3},
    "extrema-vit-b": {"mask_ratio": 0.8, "masks": 5, "class_token": "cait", "crop": "shared", "color": "own"},
    "extrema-vit-b-22k-90": {"mask_ratio": 0.9, "masks": 10, "class_token": "cait", "crop": "shared", "color": "none"},
    "lut-vit-b": {"base": "mae", "context_weight": 0.25, "pixel_weight": 1.0},
    "lut-vit-b-context": {"base": "mae", "pixel_weight": 0.0},
    "lut-simmim-vit-b": {"base": "simmim", "mask_ratio": 0.6},
    "crossmae-vit-b": {"decoder_width": 512, "decoder_depth": 12, "decoder_heads": 16, "encoder_maps": 13},
    "crossmae-vit-s": {"decoder_width": 256, "decoder_depth": 12, "decoder_heads": 8, "prediction_ratio": 0.25},
    "ijepa-vit-h": {"layers": [32], "target_blocks": 4, "decoder_width": 384, "decoder_depth": 12},
    "data2vec2-vit-b": {"layers": [*range(3, 13)], "combine": "mean", "source": "mlp", "masks": 16, "decoder": "conv"},
    "pixio-vit-h": PIXIO | {"decoder_depth": 32},
    "pixio-vit-b": PIXIO | {"decoder_depth": 12},
    **{f"lut-vit-b-weight-{w}": {"context_weight": w, "pixel_weight": 1.0} for w in (0.1, 0.25, 0.5, 1.0)},
}


# of the machine, so that nothing has to be measured
MACHINE = {"device": "cpu", "precision": "float32", "threads": 1, "workers": 0}
MACHINE |= {"attention": "fused", "kernels": "torch", "compile": False}
BUILT: dict[str, Task] = {}  # rows that differ by epochs alone have the same


def resolved(name: str, **given):
    """Return the resolved settings of a recipe, and its task at full size with fake tensors."""
    asked = request("digits", "auto", {"recipe": name, **MACHINE, **given})
    if name == "mp3-speech":
        settings = resolve(asked, 51_088, 1, unknown_stats(1, asked.sound()))[0]
    else:
        settings = resolve(asked, 100_000, 3, Stats((0.5,) * 3, (0.2,) * 3, 256, 256, 10, []))[0]
    key = f"{settings.task} {settings.encoder_spec()}"
    if key not in BUILT:
        BUILT[key] = build_task(settings.task, outline(settings.encoder_spec()))
    return settings, BUILT[key]


def test_settings_by_which_some_papers_differ():
    """Betas: MP3 4.2 largely follows DeiT, as do jigsaw and part; SimMIM, LOCA and I-JEPA have the same.

    Weights: of deviation 0.02 in the programs of Beyond Masking, SimMIM and DeiT, which MP3 follows. Clipping: at 5 in
    the programs of DropPos (its baseline MAE, too) and SimMIM, 1 in LOCA's, 4 in data2vec's; the others do not. Crops:
    LUT's program reflects 4 pixels, and DeiT adds 4 black ones at 32 pixels.
    """

    def names_of(*begins: str) -> set[str]:
        return {name for name in NAMES if name.startswith(begins)}

    settings = {name: recipe_named(name).settings for name in NAMES}
    found = {name for name in NAMES if request("digits", "auto", {"recipe": name}).betas == (0.9, 0.999)}
    assert found == names_of("mp3-", "jigsaw-", "part-", "simmim-", "loca-", "ijepa-")
    found = {name for name in NAMES if settings[name].get("initialization") == "normal"}
    assert found == names_of("restore-", "simmim-", "mp3-") - {"mp3-speech"}
    for norm, begins in {5.0: ("droppos-", "mae-vit-b-200", "simmim-"), 1.0: ("loca-",), 4.0: ("data2vec2-",)}.items():
        assert {name for name in NAMES if settings[name]["clip"] == norm} == names_of(*begins)
    assert {s["clip"] for s in settings.values()} == {0.0, 1.0, 4.0, 5.0}
    for crop, names in {"reflected": names_of("lut-"), "padded": {"mp3-cifar100", "part-cifar100"}}.items():
        assert {name for name in NAMES if settings[name].get("crop_scale") == crop} == names
    assert all(settings[name]["task"]["color"] == "second" for name in names_of("lut-"))
    assert settings["mp3-tiny-imagenet"]["crop_scale"] == 0.08


def test_the_package_brings_its_recipes():
    """They are data files, which a wheel could lack."""
    there = {one.name for one in files("patchloom.recipes").iterdir()}
    assert {f"{name}.yaml" for name in NAMES} <= there and len(NAMES) > 25 and {*OPTIONS} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_same_by_name_by_its_command_and_in_python(name):
    recipe = recipe_named(name)
    by_name, out = parse_pretrain(["digits", "--recipe", name])
    typed = shlex.split(" ".join(recipe.command("digits", 100)).replace("\\ ", ""))
    assert typed[:2] == ["patchloom", "pretrain"] and max(map(len, recipe.command("digits", 100))) <= 100
    by_command, _ = parse_pretrain(typed[2:])
    assert by_name | {"recipe": None} == by_command and by_name["recipe"] == name
    arguments = {key: value for key, value in by_name.items() if key not in ("data", "task")}
    words = request("digits", by_name["task"], arguments)
    assert request("digits", "auto", {"recipe": name}) == words
    assert words.batch_size == recipe.batch and words.accumulate == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_values_of_its_paper(name):
    recipe = recipe_named(name)
    assert recipe.finetune.split()[0] in RECIPES, "its fine-tuning"
    parse_call("evaluate", recipe.evaluation().split()[2:])
    assert all(text and text == text.strip() for text in (recipe.paper, recipe.row, recipe.data))
    assert {*recipe.published} <= {"fine-tuned", "linear"} and all(50 < one < 95 for one in recipe.published.values())
    begins = [one for one in PAPERS if name.startswith(one)]
    if begins:
        values = recipe.batch, recipe.settings["blr"], recipe.settings["warmup_epochs"]
        assert values == PAPERS[max(begins, key=len)] and recipe.task == name.partition("-")[0].replace(
            "data2vec2", "latent"
        )
    said = dict(recipe.rows())["measured here"]
    assert said == recipe.measured or (said, recipe.measured) == ("not run", "")


def test_the_smaller_batch_that_it_names_makes_several_steps(capsys):
    assert main(["recipes", "mp3-tiny-imagenet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    batch = int(re.search(r"--batch_size (\d+) splits an update into several steps", said)[1])
    assert 512 // batch > 1 and 512 % batch == 0


@pytest.mark.parametrize("task_name", sorted({recipe_named(name).task for name in NAMES}))
def test_its_task_is_built_at_the_papers_size(task_name):
    sizes = {"small": 384, "base": 768, "large": 1024, "tiny": 768, "huge": 1280}
    for name in (name for name in NAMES if recipe_named(name).task == task_name):
        recipe = recipe_named(name)
        settings, task = resolved(name)
        became = settings.task | {option: value for option, (value, _) in task.chosen.items()}
        assert {option: became[option] for option in OPTIONS.get(name, {})} == OPTIONS.get(name, {})
        assert recipe.changes(settings.plain()) == []
        if name == "mp3-speech":  # section 4.3: 40 coefficients of 98 frames, of which 5 % are known
            assert (task.geometry.width, task.geometry.grid, task.geometry.p, task.known) == (32, (1, 98), (40, 1), 4)
            assert 65_000 < sum(weight.numel() for weight in task.encoder.parameters()) < 75_000, "about 70 k"
            continue
        width, pixio = sizes[settings.model["name"].split("_")[1]], name.startswith("pixio")
        patches = {4: 64, 8: 64, 14: 256, 16: 256 if pixio else 196}
        assert (task.geometry.width, task.geometry.n) == (width, patches[settings.patch_size])
        assert (task.geometry.prefix == 8 and task.sizes == (4, 12)) == pixio
        assert task.views == recipe.views


def test_pixio_is_after_the_authors_script():
    s = recipe_named("pixio-vit-h").settings
    values = {"batch_size": 8192, "blr": 2.5e-5, "epochs": 400, "warmup_epochs": 40, "weight_decay": 0.05}
    values |= {"img_size": 256, "patch_size": 16, "crop_scale": 0.2, "flip": False, "clip": 0.0}
    assert {name: s[name] for name in values} == values
    vit = resolved("pixio-vit-h")[1].encoder
    assert (len(vit.blocks), vit.blocks[0].attn.num_heads, vit.pos_embed.shape) == (32, 16, (1, 8 + 256, 1280))
    assert abs(sum(weight.numel() for weight in vit.parameters()) / 1e6 - 631) < 1, "as their README says"


def test_options_override_it_and_two_settings_follow():
    words = "photos --recipe droppos-vit-b --epochs 80 --batch-size 256 --task.sigma 0.5".split()
    given, _ = parse_pretrain([*words, "--model.depth", "3", "--model", "nano", "--flip", "false"])
    assert (given["epochs"], given["batch_size"], given["flip"]) == (80, 256, False)
    assert (given["accumulate"], given["warmup_epochs"]) == (16, 1), "an update and the share of the warm-up stay"
    assert (given["task"]["sigma"], given["task"]["temperature"]) == (0.5, 0.1)
    model = {"name": "nano", "depth": 3}
    asked = {"recipe": "droppos-vit-b", "epochs": 80, "batch_size": 256, "model": model}
    python = request("photos", {"sigma": 0.5}, asked)
    assert (python.accumulate, python.warmup_epochs, python.task["sigma"], python.model) == (16, 1, 0.5, model)
    assert given["model"] == model
    given, _ = parse_pretrain([*words, "--accumulate", "2", "--warmup_epochs", "3"])
    assert (given["accumulate"], given["warmup_epochs"]) == (2, 3)

    def of_mae(*words: str) -> dict:
        return parse_pretrain(["photos", "--recipe=mae-vit-b", *words])[0]

    assert (of_mae("--accumulate=16")["batch_size"], of_mae("--accumulate=16")["accumulate"]) == (256, 16)
    assert request("photos", "auto", {"recipe": "mae-vit-b", "accumulate": 3}).batch_size == 1365
    assert [of_mae(f"--batch_size={batch}")["accumulate"] for batch in (300, 5000, 10_000)] == [14, 1, 1]
    given = of_mae("--epochs=auto", "--model=auto", "--task=auto")
    assert (given["epochs"], given["warmup_epochs"], given["model"]["name"]) == ("auto", "auto", "auto")
    assert given["task"]["name"] == "mae", "though shapes or an auto have another task"
    assert parse_pretrain(["shapes", "--recipe=mae-vit-b"])[0]["task"]["name"] == "mae"


def test_a_configuration_may_name_it_and_stands_above_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: photos\nrecipe: extrema-vit-b\nepochs: 30\nbatch_size: 64\ntask: {masks: 2}\n")
    given, _ = parse_pretrain(["--config", str(file), "--batch_size=128"])
    assert (given["data"], given["recipe"], given["task"]["name"]) == ("photos", "extrema-vit-b", "extrema")
    assert (given["epochs"], given["warmup_epochs"], given["batch_size"], given["accumulate"]) == (30, 4, 128, 16)
    assert (given["task"]["masks"], given["task"]["mask_ratio"], given["weight_decay"]) == (2, 0.8, 0.1)
    file.write_text("recipe: null\ntask: mae\n")
    assert parse_pretrain(["photos", "--config", str(file)])[0]["recipe"] is None


def test_an_update_is_printed_with_the_peak_of_the_rate():
    update, settings = recipe_named("mae-vit-b").update, {"blr": 1.5e-4, "accumulate": 16, "batch_size": 256}
    whole = update(settings, 100_000)
    assert "4,096 images in 16 steps of 256, as in the recipe" in whole and whole.endswith("peak is 0.0024")
    half = update(settings | {"accumulate": 1, "batch_size": 2048}, 100_000)
    assert "2,048 images (recipe: 4,096)" in half and half.endswith("1.5e-4 x 2,048 / 256 = 0.0012")
    assert "only 1,000 images" in update(settings | {"batch_size": 512, "accumulate": 8}, 1000)


def test_a_scaled_warm_up_is_printed_and_the_compared_rows_have_their_own():
    """100 epochs of MAE are compared with LUT's, which warm up for 40 of them, not for 2.5."""
    given, _ = parse_pretrain(["photos", "--recipe", "mae-vit-b", "--epochs=100"])
    recipe = recipe_named("mae-vit-b")
    said = recipe.scaling(given)
    assert "from 40 of 1,600 to 2.5 of 100" in said and "--warmup_epochs 40" in said
    assert recipe.scaling({"epochs": 20, "warmup_epochs": 0.5}).endswith("to 0.5 of 20"), "40 of 20 cannot be"
    assert recipe.scaling(recipe.settings) == recipe.scaling({"epochs": 100, "warmup_epochs": 40}) == ""
    rest = {name: value for name, value in VALUES.items() if name not in recipe.settings}
    asked = {**recipe.settings, **given, "data": "photos", "recipe": "mae-vit-b"}
    lines = describe_recipe(Settings(**asked).resolved(**rest), 100_000, "images")
    assert len(lines) == 3 and lines[1] == said
    for name in ("mae-vit-b", "mae-vit-b-100", "mae-vit-b-150", "mae-vit-b-200", "lut-vit-b-100"):
        assert recipe_named(name).settings["warmup_epochs"] == 40


def test_a_recipe_with_fewer_images_an_update_is_not_called_unchanged():
    given = recipe_named("mae-vit-b").settings
    rest = {name: value for name, value in VALUES.items() if name not in given}
    settings = Settings("photos", recipe="mae-vit-b", **given).resolved(**rest)
    assert describe_recipe(settings, 100_000, "images")[0].endswith("), unchanged")
    first, second = describe_recipe(replace(settings, batch_size=64), 100_000, "images")
    assert "unchanged but for the images of an update" in first and "(recipe: 4,096)" in second


def once(words):
    """Return the words with only the last value of each option."""
    return list({word.partition("=")[0]: word for word in words}.values())


def test_speech_is_pre_trained_for_ten_thousand_updates():
    """MP3, Table 6: 94.2 is the score of 10K updates; Table 1: 22,246 examples; section 4.3: 500 of warm-up."""
    recipe = recipe_named("mp3-speech")
    assert recipe.published == {"fine-tuned": 94.2} and recipe.images == 22_246 and recipe.batch == 256
    an_epoch = (recipe.images - round(0.05 * recipe.images)) // recipe.batch  # 5 % are held out
    assert recipe.epochs * an_epoch == pytest.approx(10_000, rel=0.005)
    assert recipe.settings["warmup_epochs"] * an_epoch == pytest.approx(500, rel=0.005)
    assert recipe.settings["halve_every"] == 10_000


def test_the_same_command_resumes_it_and_its_name_is_kept(images, tmp_path, capsys):
    out = tmp_path / "run"
    machine = typed(images, out, {})[1:]
    words = once(["pretrain", *machine, "--recipe=lut-vit-b", "--batch_size=24", "--accumulate=1", "--epochs=1"])
    assert main(words) == 0
    folder = RunFolder(out)
    assert folder.read_config().recipe == "lut-vit-b" and folder.read_data()["effective_epochs"] == 2
    log = folder.log.read_text()
    assert "recipe lut-vit-b (LUT), with model nano (vit_base_patch16_224)" in log
    assert "an update has 24 images (recipe: 4,096), so the rate's peak is 1.5e-4 x 24 / 256 = 1.406e-5" in log
    assert "effective epochs 2: a step sees 2 crops of each image" in log
    assert main(words) == 0 and "is finished" in capsys.readouterr().out
    settings = [f"--config={folder.config}", f"--out={out}"]
    assert main(["pretrain", *settings, "--recipe=null"]) == 0, "all is settled, and the name is no setting"
    assert main(once([*words, "--blr=1"])) == 2 and "blr: was" in capsys.readouterr().err


def test_a_run_by_a_recipe_has_a_folder_of_its_name(monkeypatch, tmp_path, capsys, images):
    monkeypatch.chdir(tmp_path)
    words = [word for word in typed(images, tmp_path, {}) if not word.startswith("--out")]
    assert main(once([*words, "--recipe=mae-vit-b", "--batch_size=8", "--dry-run"])) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"everything goes to runs/{images.name}-mae-vit-b" in said and "There are only" in said
    assert "effective epochs" not in said


def test_check_proposes_it(images, monkeypatch):
    monkeypatch.setattr(
        "patchloom.check.resolve", lambda asked, *others, **more: resolve(replace(asked, **MACHINE), *others, **more)
    )
    done = check(images, recipe="mae-vit-b", model="nano", img_size=32, patch_size=8, estimate=False)
    settings = done.proposal.settings
    assert (settings.task["name"], settings.blr, settings.epochs) == ("mae", 1.5e-4, 1600)
    words = shlex.split(done.proposal.command)
    assert "--task" not in words and words[words.index("--recipe") + 1] == "mae-vit-b"
    given, _ = parse_pretrain(words[2:])
    assert (given["blr"], given["warmup_epochs"], given["accumulate"], given["clip"]) == (1.5e-4, 40, 1, 0)
    assert "task" not in done.proposal.reasons


def test_effective_epochs_count_crops_that_an_encoder_is_given():
    task = {name: resolved(name, model="nano")[1] for name in ("mae-vit-b", "extrema-vit-s", "restore-vit-b")}
    assert effective(task["mae-vit-b"], 100) == effective(task["extrema-vit-s"], 100) == ""
    given = "effective epochs 1,000: a step uses 224x224 of each crop of 320x320"
    assert effective(task["restore-vit-b"], 1000) == given
    own = request("digits", {"name": "extrema", "crop": "own"}, {"recipe": "extrema-vit-s"})
    assert own.task["crop"] == "own"
