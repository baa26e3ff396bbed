"""Published formats of weights, and timm's conversion of them."""

from pathlib import Path

import timm
import torch
from perturbing import perturbed
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn

from patchloom.nets.build import EncoderSpec, build_encoder

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
NAME = "vit_tiny_patch16_224"


def theirs(img_size=16, patch_size=4, seed=0, **options):
    """Return a ViT of timm's with no weight at zero or one."""
    torch.manual_seed(seed)
    vit = timm.create_model(
        NAME, img_size=img_size, patch_size=patch_size, **({"num_classes": 0} | TINY | options)
    ).eval()
    return perturbed(vit, 0.1)


def ours(img_size=16, patch_size=4, channels=3, positions="learned", **options):
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    torch.manual_seed(7)
    return build_encoder(EncoderSpec(NAME, size, patch_size, channels, positions, TINY | options)).eval()


def written(path: Path, state) -> Path:
    """Write a file with a state dict, possibly nested."""
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)
    return path


def same(one, other, images, tolerance=0.0):
    with torch.inference_mode():
        torch.testing.assert_close(one.forward_features(images), other.forward_features(images), rtol=0, atol=tolerance)


def by_timm(source, **arguments):
    """Return timm's own conversion of the weights to other sizes."""
    vit = timm.create_model(NAME, **({"num_classes": 0} | TINY | arguments)).eval()
    vit.load_state_dict(checkpoint_filter_fn(dict(source.state_dict()), vit), strict=False)
    return vit
