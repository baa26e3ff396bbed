"""Code templates of ``export``: preprocessing of images and recordings as in patchloom, without patchloom."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from patchloom.audio.config import Sound
from patchloom.audio.spectrogram import FLOOR
from patchloom.export.encoder import Exportable
from patchloom.nets.encode import prefix_count

_LUMA = "[0.299, 0.587, 0.114]"  # ITU-R BT.601, as in `patchloom.data.decode.to_channels`

OPENING = """\
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode == "F" or image.mode.startswith("I"):
        raise ValueError(f"{file} has more than 8 bits, which Pillow would truncate")
"""
READING = f'''\
def read(file):
    """Read an image file as pixels [h w 3], upright and with transparency over white."""
{OPENING}\
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))
'''


def centre_crop_code(size: tuple[int, int]) -> str:
    """Return code for the largest centre crop with the aspect ratio of ``size`` in an image."""
    h, w = size
    return (
        f"    h, w = min(height, max(1, round(width / ({w} / {h})))), min(width, max(1, round(height * ({w} / {h}))))\n"
        "    top, left = (height - h) // 2, (width - w) // 2\n"
    )


def preparing_by_torch(size: tuple[int, int], channels: int, by_file: bool) -> str:
    """Return code of a function that crops and resizes 8-bit pixels [h w 3], or an image [c h w] of any depth."""
    h, w = size
    if by_file:
        about = f'    """Crop pixels [h w 3] at the centre and resize them to [1 {channels} {h} {w}] in [0, 1]."""\n'
        take = "    image = torch.from_numpy(pixels).permute(2, 0, 1)\n"
        if channels == 1:
            take += f'    grey = torch.einsum("chw,c->hw", image.float(), torch.tensor({_LUMA}))\n'
            take += "    image = grey.round().to(torch.uint8)[None]\n"
        name, scaled = "pixels", "    return resized.float() / 255\n"
    else:
        axis = "" if channels > 1 else "[None]"
        read = f'tifffile.imread(file){axis}.astype("float32") / 65535'
        about = (
            f'    """Crop an image [{channels} h w] at the centre and resize it to [1 {channels} {h} {w}] in '
            "[0, 1].\n\n"
            "    The image is uint8, or float32 in [0, 1]. For a 16-bit TIFF file with its channels first:\n"
            f"    torch.from_numpy({read})\n"
            '    """\n'
            "    if image.dtype != torch.uint8 and not (image.is_floating_point() and image.max() <= 1):\n"
            '        raise ValueError("values are not uint8 or float in [0, 1]: divide those of 16 bits by 65535")\n'
        )
        name, take = "image", ""
        scaled = "    return resized.float() / 255 if resized.dtype == torch.uint8 else resized.clamp(0, 1)\n"
    return (
        f"def prepare({name}):\n{about}{take}"
        "    height, width = image.shape[1:]\n"
        f"{centre_crop_code(size)}"
        "    crop = image[None, :, top : top + h, left : left + w]\n"
        f'    resized = torch.nn.functional.interpolate(crop, ({h}, {w}), mode="bicubic", antialias=True)\n'
        f"{scaled}"
    )


def preparing_by_pillow(size: tuple[int, int], channels: int, test_crop: float = 1.0) -> str:
    """Return code of the same function for pixels [h w 3], without torch; ``test_crop`` is as in `CentreCrop`."""
    h, w = size
    grey = _grey_code(channels)
    axes = "[None, None]" if channels == 1 else ".transpose(2, 0, 1)[None]"
    if test_crop < 1:
        return (
            "def prepare(pixels):\n"
            f'    """Resize pixels [h w 3] and crop them at the centre to [1 {channels} {h} {w}] in [0, 1]."""\n'
            f"{grey}"
            "    height, width = pixels.shape[:2]\n"
            f"    tall, wide = {int(h / test_crop)}, {int(w / test_crop)}\n"
            "    if tall * width >= wide * height:\n"
            "        wide = max(wide, int(tall * width / height))\n"
            "    else:\n"
            "        tall = max(tall, int(wide * height / width))\n"
            "    resized = Image.fromarray(pixels).resize((wide, tall), Image.Resampling.BICUBIC)\n"
            f"    top, left = round((tall - {h}) / 2), round((wide - {w}) / 2)\n"
            f"    crop = np.asarray(resized, dtype=np.float32)[top : top + {h}, left : left + {w}]\n"
            f"    return crop{axes} / 255\n"
        )
    return (
        "def prepare(pixels):\n"
        f'    """Crop pixels [h w 3] at the centre and resize them to [1 {channels} {h} {w}] in [0, 1]."""\n'
        f"{grey}"
        "    height, width = pixels.shape[:2]\n"
        f"{centre_crop_code(size)}"
        "    crop = Image.fromarray(pixels[top : top + h, left : left + w])\n"
        f"    resized = np.asarray(crop.resize(({w}, {h}), Image.Resampling.BICUBIC), dtype=np.float32)\n"
        f"    return resized{axes} / 255\n"
    )


def _grey_code(channels: int) -> str:
    """Return code that turns ``pixels`` [h w 3] into [h w] for an encoder of grey images."""
    return f"    pixels = np.round(pixels @ np.float32({_LUMA})).astype(np.uint8)\n" if channels == 1 else ""


def segmenting_by_pillow(size: tuple[int, int], channels: int, side: int | None) -> str:
    """Return code that gives each pixel of an image file its class, in windows of a segmenter's ``size``.

    Args:
        size: height and width of a window in pixels.
        channels: number of channels, 1 or 3.
        side: shorter side to which images are resized; None: they are not.
    """
    h, w = size
    factor = "1" if side is None else f"{side} / min(image.size)"
    axes = "[None]" if channels == 1 else ".transpose(2, 0, 1)"
    return (
        "def starts(length, window):\n"
        "    step = max(1, int(2 / 3 * window))\n"
        "    count = -(-max(0, length - window) // step) + 1\n"
        "    return [min(i * step, length - window) for i in range(count)]\n\n\n"
        "def segment(file):\n"
        '    """Return the class of each pixel [h w] of an image file, as a number in CLASSES."""\n'
        "    pixels = read(file)\n"
        f"{_grey_code(channels)}"
        "    image = Image.fromarray(pixels)\n"
        f"    factor = {factor}\n"
        "    small = image.resize([max(1, round(side * factor)) for side in image.size], Image.Resampling.BILINEAR)\n"
        f"    values = np.asarray(small, np.float32){axes}\n"
        "    height, width = values.shape[1:]\n"
        f"    padded = np.empty((len(values), max(height, {h}), max(width, {w})), np.float32)\n"
        "    padded[:] = np.round(values.mean((1, 2)))[:, None, None]  # the mean colour, to the right and below\n"
        "    padded[:, :height, :width] = values\n"
        "    total = 0 * np.resize(padded[:1], (len(CLASSES), *padded.shape[1:]))\n"
        "    count = np.zeros(padded.shape[1:], np.float32)\n"
        f"    for top in starts(padded.shape[1], {h}):\n"
        f"        for left in starts(padded.shape[2], {w}):\n"
        f"            place = np.s_[top : top + {h}, left : left + {w}]\n"
        "            total[:, *place] += run(padded[None, :, *place] / 255)[0][0]\n"
        "            count[place] += 1\n"
        "    logits = (total / count)[:, :height, :width]\n"
        "    maps = [Image.fromarray(one).resize(image.size, Image.Resampling.BILINEAR) for one in logits]\n"
        "    return np.argmax([np.asarray(one) for one in maps], axis=0)\n"
    )


def detecting_by_pillow(
    size: tuple[int, int], channels: int, mean: Sequence[float], sides: tuple[int, int] | None
) -> str:
    """Return code that detects the objects of an image file.

    Args:
        size: height and width of the detector's canvas in pixels.
        channels: number of channels, 1 or 3.
        mean: mean of each channel, the colour of the padding.
        sides: largest shorter and longer side of an image; None: it fills the canvas.
    """
    h, w = size
    limits = [f"{h} / height", f"{w} / width"]
    if sides is not None:
        limits += [f"{sides[0]} / min(height, width)", f"{sides[1]} / max(height, width)"]
    axes = "[None]" if channels == 1 else ".transpose(2, 0, 1)"
    return (
        "def detect(file, score=0.5):\n"
        '    """Return (class, score, box) of each object of an image file; boxes are x0 y0 x1 y1 in its pixels."""\n'
        "    pixels = read(file)\n"
        f"{_grey_code(channels)}"
        "    height, width = pixels.shape[:2]\n"
        f"    factor = min({', '.join(limits)})\n"
        f"    h, w = min({h}, max(1, round(height * factor))), min({w}, max(1, round(width * factor)))\n"
        "    small = Image.fromarray(pixels).resize((w, h), Image.Resampling.BILINEAR)\n"
        f"    canvas = np.empty((1, {channels}, {h}, {w}), np.float32)\n"
        f"    canvas[:] = np.float32({[*mean]})[:, None, None]  # zero after the normalisation\n"
        f"    canvas[0, :, :h, :w] = np.asarray(small, np.float32){axes} / 255\n"
        "    boxes, labels, scores = run(canvas)[:3]\n"
        "    boxes = boxes * np.float32([width / w, height / h, width / w, height / h])\n"
        "    boxes = np.clip(boxes, 0, np.float32([width, height, width, height]))\n"
        "    each = zip(labels, scores, boxes)\n"
        "    return [(CLASSES[k], float(s), box.tolist()) for k, s, box in each if s >= score]\n"
    )


def pooling_code(one: Exportable) -> str:
    """Return an expression for the vectors [b d] of ``tokens``, which are a map [b rows columns d] for a Swin."""
    prefix = prefix_count(one.vit)
    patches = "tokens.flatten(1, 2)" if one.hierarchical else f"tokens[:, {prefix}:]"
    found = {"class": "tokens[:, 0]", "mean": f"{patches}.mean(1)", "prefix": f"tokens[:, :{prefix}].mean(1)"}
    if one.pooled_norm:
        found = {name: f"encoder.fc_norm({code})" for name, code in found.items()}
    return found.get(one.pooling, f"torch.cat([{found['class']}, {found['mean']}], dim=1)")


# Code of spectrograms with torch only.


_BANDS = """\
# triangular filters, evenly spaced on the mel scale
ends = 2595 * torch.log10(1 + torch.tensor([{low}, {top}], dtype=torch.float64) / 700)
edges = 700 * (10 ** (torch.linspace(*ends.tolist(), {m} + 2, dtype=torch.float64) / 2595) - 1)[:, None]
hertz = torch.arange({k}, dtype=torch.float64) * {rate} / {n}
rising, falling = (hertz - edges[:-2]) / edges.diff(dim=0)[:-1], (edges[2:] - hertz) / edges.diff(dim=0)[1:]
bands = torch.minimum(rising, falling).clamp(min=0).float()
"""
_COSINES = """\
# the first {h} rows of the orthonormal DCT-II
angles = torch.pi / {m} * (torch.arange({m}).double() + 0.5) * torch.arange({h})[:, None]
cosines = (torch.cos(angles) * (2 / {m}) ** 0.5).float()
cosines[0] /= 2**0.5
"""
_PICTURES = '''\
# statistics of each row over the training recordings
mean = {mean}[:, None]
std = {std}[:, None]


def pictures(waves):
    """Standardised features [b 1 {h} {w}] of waveforms [b {samples}] in [-1, 1]: {seconds:g} s at {rate:,} Hz."""
    window = torch.hann_window({n})
    spectrum = torch.stft(waves, {n}, {hop}, window=window, center=False, return_complex=True)
    energy = torch.log(bands @ spectrum.abs().square() + {floor})
    return (({features} - mean) / std)[:, None]
'''
_LINE = 100


def code_of_pictures(sound: Sound) -> str:
    """Return code that defines ``pictures``, a function from waveforms to the encoder's input."""
    logmel = sound.features == "logmel"
    return (_BANDS + _COSINES * (not logmel) + _PICTURES).format(
        low=sound.low,
        top=sound.rate / 2,
        m=sound.bins if logmel else sound.bands,
        k=sound.window_samples // 2 + 1,
        h=sound.bins,
        w=sound.frames,
        mean=_tensor(sound.mean),
        std=_tensor(sound.std),
        samples=sound.samples,
        seconds=sound.seconds,
        rate=sound.rate,
        n=sound.window_samples,
        hop=sound.hop_samples,
        floor=FLOOR,
        features="energy" if logmel else "cosines @ energy",
    )


def _tensor(values: Sequence[float]) -> str:
    """Return code of a tensor with all digits of float32."""
    numbers = fill(
        ", ".join(f"{value:.9g}" for value in values), _LINE, initial_indent="    ", subsequent_indent="    "
    )
    return f"torch.tensor([\n{numbers}\n])"
