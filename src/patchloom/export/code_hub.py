"""Pieces of code that ``export --to hf`` prints and writes into the model card: by timm, and by transformers."""

from __future__ import annotations


def by_timm(place: str, channels: int) -> str:
    """An encoder from ``place``, as ``timm.create_model`` takes it, and the vector of an image file."""
    code = (
        "import timm\n"
        "import torch\n"
        f"{_pillow(channels)}"
        f"encoder = timm.create_model({place!r}, pretrained=True).eval()\n"
    )
    if not _readable(channels):
        return f"{code}{_of_tensors(channels)}"
    return (
        f"{code}"
        "config = timm.data.resolve_model_data_config(encoder)\n"
        "transform = timm.data.create_transform(**config, is_training=False)\n\n\n"
        "@torch.inference_mode()\n"
        "def embed(file):\n"
        '    """The vector [d] of an image file."""\n'
        f"{_opened(channels)}"
        "    return encoder(transform(image)[None])[0]\n"
    )


def by_transformers(place: str, channels: int) -> str:
    """The same by transformers, whose ``place`` is a folder or a name on the Hub."""
    if not _readable(channels):
        return (
            "import torch\n"
            "from transformers import AutoModel\n\n"
            f"encoder = AutoModel.from_pretrained({place!r}).eval()\n"
            f"{_of_tensors(channels, '.pooler_output')}"
        )
    return (
        "import torch\n"
        f"{_pillow(channels)[:-1]}"
        "from transformers import AutoImageProcessor, AutoModel\n\n"
        f"encoder = AutoModel.from_pretrained({place!r}).eval()\n"
        f"processor = AutoImageProcessor.from_pretrained({place!r})\n\n\n"
        "@torch.inference_mode()\n"
        "def embed(file):\n"
        '    """The vector [d] of an image file."""\n'
        f"{_opened(channels)}"
        "    return encoder(**processor(image)).pooler_output[0]\n"
    )


def _readable(channels: int) -> bool:
    """Whether Pillow, and so the transforms of timm and transformers, has images of so many channels."""
    return channels in (1, 3)


def _pillow(channels: int) -> str:
    return "from PIL import Image, ImageOps\n\n" if _readable(channels) else "\n"


def _opened(channels: int) -> str:
    """Lines that open ``file``: upright, over white where it is transparent, and with the channels of the encoder."""
    return (
        '    image = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")\n'
        '    white = Image.new("RGBA", image.size, "white")\n'
        f'    image = Image.alpha_composite(white, image).convert("{"L" if channels == 1 else "RGB"}")\n'
    )


def _of_tensors(channels: int, output: str = "") -> str:
    return (
        "\n\n@torch.inference_mode()\n"
        "def vectors(images):\n"
        f'    """Vectors [b d] of normalised images [b {channels} h w] of the encoder\'s size."""\n'
        f"    return encoder(images){output}\n"
    )
