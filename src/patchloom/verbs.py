"""What each verb takes. Everything follows from signatures but for what words on a command line need besides."""

from __future__ import annotations

from typing import Any, Literal

from patchloom.errors import PatchloomError
from patchloom.hints import listing, suggestion
from patchloom.signatures import Listed, Option, listed, shipped, shipped_names
from patchloom.tasks import AUTO, TASKS, task_class

VERBS: dict[str, str] = {
    "check": "read all images, report what is wrong with them, and propose how to pre-train",
    "pretrain": "train an encoder on images without labels",
    "evaluate": "measure what an encoder learnt, by one of many protocols",
    "compare": "pre-train by several tasks for equal time, and tell which suits the images",
    "embed": "write the features of every image for other programs, and find the nearest",
    "predict": "write label maps or objects of images by a model that evaluate saved",
    "look": "draw what was withheld and what came back, or what an encoder sees",
    "report": "write a page that tells what a run did, or several",
    "export": "write an encoder for use without patchloom: timm, Hugging Face, ONNX",
    "bench": "time each task on this machine, and tell what limits a run",
    "tasks": "list the pretext tasks",
    "recipes": "list the papers' settings with what they gave, or show one",
}
# timm's keyword arguments that change an encoder's shape, as --model.NAME; Python takes any that timm knows.
MODEL_OPTIONS: dict[str, tuple[Any, str]] = {
    "embed_dim": (int, "width"),
    "depth": (int, "transformer blocks"),
    "num_heads": (int | list[int], "attention heads; of a Swin in each stage, as in '[1, 2, 4]'"),
    "depths": (list[int], "blocks in each stage of a Swin"),
    "window_size": (int, "patches along a window of a Swin"),
    "mlp_ratio": (float, "hidden width of an MLP over its width"),
    "class_token": (bool, "whether there is a class token"),
    "reg_tokens": (int, "register tokens"),
    "no_embed_class": (bool, "no position embedding for class and register tokens"),
    "pre_norm": (bool, "a norm before the blocks, as in CLIP"),
    "qk_norm": (bool, "norm queries and keys"),
    "init_values": (float, "LayerScale's initial value"),
    "drop_path_rate": (float, "stochastic depth"),
    "pos_drop_rate": (float, "dropout of the tokens that enter the blocks"),
    "attn_drop_rate": (float, "dropout of attention weights"),
    "proj_drop_rate": (float, "dropout of what attention gives, and in MLPs"),
}
_IMAGES = "a folder of images, or what else holds some"
_ENCODER = "a run's folder, an encoder's .safetensors file, or timm:NAME"
# what protocols take that are not for classes of images
_LABELLED = {
    "keywords": "recordings of words, in Speech Commands' layout, or in a folder a word",
    "label-free": "images, which need no labels, such as a folder",
    "segment": "images with label maps, such as images/ and labels/, with or without train/ val/ test/ in them",
    "detect": "images with boxes in COCO's, Pascal VOC's or YOLO's form, with or without train/ val/ test/",
}


def protocols() -> list[str]:
    """The names of the protocols of evaluation."""
    return shipped_names("protocols")


def of_verb(verb: str) -> Listed:
    """What ``patchloom VERB`` takes, where that is what its function takes."""
    found = shipped("verbs", verb)
    assert found is not None, f"{verb} is not in options.json: python docs/make_options.py"
    return found


def of_task(name: str) -> Listed:
    """What a pretext task takes.

    Raises:
        PatchloomError: no task has that name.
    """
    found = shipped("tasks", TASKS[name].path) if name in TASKS else None
    return listed(task_class(name), skip={"encoder"}) if found is None else found


def of_pretrain(task: str) -> Listed:
    """What ``patchloom pretrain --task TASK`` takes.

    Raises:
        PatchloomError: no task has that name.
    """
    own = of_verb("pretrain")
    folder = "folder of the run (default runs/DATA-TASK or -RECIPE); what was stopped there goes on"
    size = "pixels that the encoder is given; 64x128 is height x width"
    model = "nano, micro or mini (ours, the smallest first), swin-nano, or timm's name of a ViT or Swin"
    word = str | Literal["auto"]
    options = [
        Option("data", str, None, _IMAGES, positional=True, required=True),
        Option("out", str | None, None, folder, kind="folder"),
        Option("config.file", str | None, None, "these options in YAML; the command line wins", kind="file"),
        *own.options,
        Option("img_size", word, "auto", size, kind="96, 64x128 or auto"),
        Option("model.name", word, "auto", model, kind="name or auto"),
        *(Option(f"model.{name}", kind | None, None, about) for name, (kind, about) in MODEL_OPTIONS.items()),
        Option(
            "task.name",
            str,
            AUTO,
            f"the pretext task: {listing(TASKS)}; auto is mae, and droppos for shapes",
            kind="name or auto",
        ),
        *(option._replace(name=f"task.{option.name}") for option in of_task(task).options),
    ]
    return Listed(own.about, tuple(options))


def of_evaluate(name: str | None) -> Listed:
    """What ``patchloom evaluate NAME`` takes; without a name, what all protocols take.

    Raises:
        PatchloomError: no such protocol.
    """
    common = of_verb("evaluate")
    own = Listed("", ())
    if name is not None:
        found = shipped("protocols", name.partition(":")[0])
        if found is None:
            known = protocols()
            raise PatchloomError(f"there is no protocol {name}{suggestion(name, known)} Choose {listing(known)}.")
        own = found
    labelled = _LABELLED.get(name or "", "labelled images, such as a folder with a folder for each class")
    words = {"protocol": "how it is measured", "run": _ENCODER, "data": labelled}
    places = [Option(one, str, None, about, positional=True, required=True) for one, about in words.items()]
    return Listed(own.about or common.about, (*places, *own.options, *common.options))
