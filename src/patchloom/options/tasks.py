"""Options of the pretext tasks, a dataclass each; `patchloom.tasks.TASKS` names it beside the task's class."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from patchloom.options.declare import option

Size = int | Literal["auto"]
Strength = float | list[float] | Literal["auto"]  # of a degradation

# views and pixels
Sharing = Literal["none", "shared", "own"]
Coloring = Literal["none", "shared", "own", "second"]  # the last is LUT's, which changes the second view alone
TargetNorm = Literal["channel", "patch"]
BandTarget = Literal["grown", "original"]

# degradations of an image
DegradationKind = Literal["masked", "zoom_in", "zoom_out", "fisheye", "wave", "blur", "decolorize", "none"]
CropPlace = Literal["centre", "random"]
Fill = Literal["mirror", "black", "images", "none"]
CanvasFit = Literal["resize", "crop"]
KernelInit = Literal["normal", "kaiming", "xavier"]
KernelOf = Literal["channel", "image"]

# questions
Smoothing = Literal["paper", "program"]
Representation = Literal["cait", "vit", "mean"]
Loss = Literal["byol", "infonce", "sigreg", "visreg"]
FeatureLoss = Literal["cosine", "smooth_l1"]
HiddenLoss = Literal["smooth_l1", "mse"]
LayerOutput = Literal["block", "mlp"]
Combine = Literal["each", "mean"]

# of one task each
Placeholder = Literal["auto", "learned", "zeros", "foreign"]  # DropPos
Sampling = Literal["random", "block", "centre", "surroundings"]  # Restore
MaskSampling = Literal["blocks", "inverse", "random"]  # Latent
Predictor = Literal["transformer", "conv"]  # Latent
Base = Literal["mae", "simmim"]  # LUT
Color = Literal["none", "own"]  # DIET
Head = Literal["attention", "linear"]  # PART
Second = Literal["same", "second", "none"]  # Mixture
Padding = Literal["mirror", "black", "images"]  # Mixture


@dataclass(frozen=True)
class MAEOptions:
    """Reconstruction of the pixels of removed patches."""

    mask_ratio: float = option(
        0.75, "fraction γ of the mask units that is removed; for a Swin always 0.75", least=0, below=1
    )
    normalized_pixels: bool = option(True, "target pixels normalised within each patch")
    decoder_width: Size = option("auto", "width of the decoder; auto: 512, or the encoder's below ViT-S")
    decoder_depth: Size = option("auto", "number of transformer blocks of the decoder; auto: 8, or 2 below ViT-S")
    decoder_heads: Size = option(
        "auto", "number of attention heads of the decoder; auto: 16, or one per 32 channels below ViT-S"
    )
    mask_unit: Size = option(
        "auto", "side of a mask unit in pixels; auto: one patch. Pixio's is 4x4 patches, 64 pixels for patches of 16"
    )


@dataclass(frozen=True)
class CrossMAEOptions:
    """Independent reconstruction of the pixels of some removed patches, by cross-attention alone."""

    mask_ratio: float = option(0.75, "fraction γ of the patches that is removed", least=0, below=1)
    prediction_ratio: float = option(
        0.25,
        "fraction ρ of all patches that a training step predicts, at most the masked ones; measures and pictures "
        "predict all of these",
    )
    normalized_pixels: bool = option(True, "target pixels normalised within each patch")
    encoder_maps: Size = option(
        "auto",
        "number of feature maps of the encoder, evenly spaced, that each decoder block weighs (inter-block "
        "attention); auto: all, the embedding and every block; 1: the encoder's output alone",
    )
    decoder_width: Size = option("auto", "width of the decoder; auto: 512, or the encoder's below ViT-S")
    decoder_depth: Size = option("auto", "number of blocks of the decoder; auto: 12, or 2 below ViT-S")
    decoder_heads: Size = option(
        "auto", "number of attention heads of the decoder; auto: 16, or one per 32 channels below ViT-S"
    )


@dataclass(frozen=True)
class SimMIMOptions:
    """Reconstruction of the pixels of patches that were replaced by a mask token."""

    mask_ratio: float = option(0.6, "fraction of the mask units that is replaced", least=0, below=1)
    mask_unit: Size = option(
        "auto",
        "side of a mask unit in pixels; auto: two patches (32 pixels for patches of 16), or one if the grid has odd "
        "sides; for a Swin the area of one token of its last stage, 32 pixels for Swin-T",
    )
    normalized_pixels: bool = option(False, "target pixels normalised within each patch")


@dataclass(frozen=True)
class DropPosOptions:
    """Prediction of dropped positions, after other patches were removed."""

    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction γ of the patches that is removed; auto: the paper's 0.75, lowered until 16 patches stay. A Swin "
        "takes 0.75 or 0",
        least=0,
        below=1,
    )
    position_mask_ratio: float = option(
        0.75, "fraction γ_pos of the visible patches whose position embedding is dropped", above=0, most=1
    )
    sigma: float = option(
        1.0, "σ of position smoothing (Eq. 5) at the start of the training; 0 switches it off", least=0
    )
    sigma_end: float = option(
        0.0, "σ at the end of the training, reached linearly (Eq. 7); equal to ``sigma``: constant (Table 3)"
    )
    smoothing: Smoothing = option(
        "paper", "smoothed labels of Eq. 5 (paper), or of the authors' program, which mistakes the grid"
    )
    temperature: float | Literal["auto"] = option(
        "auto",
        "τ of attentive reconstruction (Eq. 9); inf weighs all patches alike. auto: the paper's 0.1, but inf without "
        "masking, because the forward pass over the whole image would add a third to the step",
        above=0,
        most=inf,
    )
    placeholder: Placeholder = option(
        "auto",
        "stand-in for a dropped position: a learned vector, zeros, or another patch's position. auto: learned, as in "
        "the paper; for a Swin zeros, because without pre-training it has no position embeddings. Rotations (RoPE) "
        "are dropped, too: learned is a trained place of two coordinates, zeros no rotation",
    )
    shuffle: bool = option(
        False, "random order of the visible patches instead of row by row. Does not affect the result"
    )
    pixels: bool = option(
        False, "reconstruction of the removed patches as a second task, with MAE's decoder; the two losses are added"
    )
    normalized_pixels: bool = option(True, "with ``pixels``, target pixels normalised within each patch")
    decoder_width: Size = option("auto", "width of the decoders; auto: 512, or the encoder's below ViT-S")
    decoder_depth: Size = option("auto", "number of transformer blocks of the position decoder; auto: 2")
    decoder_heads: Size = option(
        "auto", "number of attention heads of the decoders; auto: 16, or one per 32 channels below ViT-S"
    )
    pixel_decoder_depth: Size = option(
        "auto", "number of transformer blocks of the pixel decoder; auto: 8, or 2 below ViT-S"
    )


@dataclass(frozen=True)
class MP3Options:
    """Prediction of the positions of all patches, with most patches barred from keys and values."""

    context_mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction η of the patches that are queries only, neither keys nor values; auto: the paper's for such a grid: "
        "0.75 from 100 patches (ImageNet), 0.8 from 64 patches of 8 pixels or more (Tiny ImageNet), else 0.5 "
        "(CIFAR-100)",
        least=0,
        below=1,
    )
    known_positions: float = option(
        0.0,
        "fraction of the patches that keep their position embedding (5 % in the paper's speech models)",
        least=0,
        below=1,
    )


@dataclass(frozen=True)
class RestoreOptions:
    """Reconstruction of the original from a degraded image: a part, or changed geometry, sharpness or colour."""

    degradation: DegradationKind = option(
        "zoom_in",
        "change of the image: zoom_in shows the centre of a larger image; zoom_out a small copy amid its mirror "
        "images; fisheye bends it; wave shifts its columns up and down; blur convolves it with a random kernel; "
        "decolorize removes colour; masked and none leave it unchanged",
    )
    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction γ of the patches that is also removed; auto: 0.75 for zoom_in and masked, else 0",
        least=0,
        below=1,
    )
    sampling: Sampling = option(
        "random",
        "choice of the visible patches: random ones; one block, at a random place (block) or in the centre (centre); "
        "or all but a block in the centre (surroundings)",
    )
    canvas: Size = option(
        "auto",
        "shorter side in pixels of the image before zoom_in, fisheye or wave; auto: 10/7 of the input for zoom_in "
        "(320 for 224), the input's size for the others",
    )
    canvas_fit: CanvasFit | Literal["auto"] = option(
        "auto",
        "reduction of a larger canvas to the input after fisheye or wave: resize (auto), or crop to the centre. The "
        "target is the centre before it was bent",
    )
    zoom_place: CropPlace | Literal["auto"] = option(
        "auto", "part that zoom_in shows: the centre (auto), or one at a random place"
    )
    band_weight: float | Literal["auto"] = option(
        "auto",
        "fraction of the loss on the band around the input, with zoom_in and masks; the rest is on the masked "
        "patches. auto: 0.2",
        least=0,
        most=1,
    )
    band_target: BandTarget | Literal["auto"] = option(
        "auto",
        "target of the band around the input: the canvas reduced to the input's size and enlarged again, as in the "
        "authors' program (grown), or the canvas itself (original); auto: grown if pixels are normalised, else "
        "original",
    )
    scale: Strength = option(
        "auto",
        "fraction of the side that zoom_in shows (without a canvas) or to which zoom_out shrinks; a number or a list "
        "to draw from; auto: 0.714",
    )
    fill: Fill | Literal["auto"] = option(
        "auto",
        "surroundings of zoom_out's small copy: its mirror images (auto), black, patches of other images, or none: "
        "only the patches that it covers enter",
    )
    twist: Strength = option("auto", "strength of fisheye; a number, or two bounds to draw between; auto: 0.2 to 0.25")
    amplitude: Strength = option(
        "auto",
        "amplitude of wave as a fraction of the height; a number, or two bounds to draw between; auto: 0.05 to 0.1",
    )
    kernel: Strength = option(
        "auto",
        "side of blur's kernel in pixels, odd; a number or a list to draw from; auto: 9 for 224 pixels, and in "
        "proportion for other sizes",
    )
    kernel_init: KernelInit | Literal["auto"] = option(
        "auto", "weights of blur's kernels: normal around the mean (auto), or around 0 as in kaiming or xavier"
    )
    kernel_of: KernelOf | Literal["auto"] = option(
        "auto", "one blur kernel per channel of an image (auto: channel), or one for all channels (image)"
    )
    saturation: Strength = option(
        "auto", "fraction of the colour that decolorize leaves; a number or a list to draw from; auto: 0.3"
    )
    normalized_pixels: bool = option(True, "target pixels normalised within each patch")
    target_norm: TargetNorm | Literal["auto"] = option(
        "auto",
        "statistics that normalise the targets: those of each channel of a patch (auto: channel), or of the whole "
        "patch, as in mae (patch)",
    )
    decoder_width: Size = option(
        "auto", "width of the decoder; auto: 384, 512 for a ViT-L, or the encoder's below ViT-S"
    )
    decoder_depth: Size = option("auto", "number of transformer blocks of the decoder; auto: 4, or 2 below ViT-S")
    decoder_heads: Size = option(
        "auto", "number of attention heads of the decoder; auto: 6, 8 for a ViT-L, or one per 32 channels below ViT-S"
    )


@dataclass(frozen=True)
class ExtreMAOptions:
    """Agreement of several small parts of an image with a teacher that sees all of it."""

    mask_ratio: float = option(0.8, "fraction γ of the patches that is removed", least=0, below=1)
    masks: int | Literal["auto"] = option(
        "auto",
        "number of disjoint masks per image, compared with one output of the teacher; auto: 5, as in the paper's main "
        "result (Table 7), or fewer if there are too few patches",
    )
    loss: Loss | Literal["auto"] = option(
        "auto",
        "agreement loss: byol; infonce with the other images of all processes as negatives; or sigreg (LeJEPA) or "
        "visreg, which have neither teacher nor negatives; auto: byol, as in the paper's main results, but infonce in "
        "trainings of fewer than 20,000 updates: byol showed no gain in 2,448",
    )
    temperature: float | Literal["auto"] = option("auto", "τ of infonce; auto: 0.2", above=0)
    gaussian_weight: float | Literal["auto"] = option(
        "auto",
        "λ of sigreg and visreg: weight of the test for a Gaussian; that of the agreement is 1 - λ. auto: 0.05 for "
        "sigreg, 0.9 for visreg, or 0.6 below ViT-S",
        above=0,
        below=1,
    )
    directions: Size = option(
        "auto",
        "number of random directions of that test; auto: 1024 for sigreg, 4096 for visreg, or 256 below ViT-S",
        least=1,
    )
    class_token: Representation = option(
        "cait",
        "image representation: a class token in class-attention blocks after the encoder (cait), the encoder's own "
        "class token (vit), or the mean of its patch tokens (mean)",
    )
    attention_blocks: Size = option(
        "auto", "number of class-attention blocks of cait (Table 5 has 1 to 3); auto: 2", least=1
    )
    crop: Sharing = option(
        "shared", "crop of student and teacher: the centre (none), one random crop for both (shared), or one each (own)"
    )
    color: Coloring = option(
        "own",
        "colour changes: none, the same for both views (shared), or independent ones (own); or those of LUT's second "
        "view (second)",
    )
    momentum: float | Literal["auto"] = option(
        "auto",
        "momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short trainings",
        least=0,
        most=1,
    )
    head_width: Size = option(
        "auto",
        "hidden width of projection and prediction heads; auto: 4096, 2048 for sigreg and visreg, or 4 encoder widths "
        "below ViT-S",
    )
    head_out: Size = option(
        "auto", "output width of the heads; auto: 256, 64 for sigreg, or at most the encoder's width below ViT-S"
    )


@dataclass(frozen=True)
class LUTOptions:
    """Pixel reconstruction and agreement with a teacher, from disjoint parts of two views."""

    base: Base = option(
        "mae",
        "masked-image method: mae removes masked patches and decodes their pixels; simmim replaces them by a mask "
        "token",
    )
    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction γ of the patches that is withheld from each view; auto: 0.75 on mae, 0.6 on simmim",
        least=0,
        below=1,
    )
    context_weight: float = option(
        0.25, "weight of the broader-context loss: agreement of the unmasked tokens with the teacher", above=0
    )
    pixel_weight: float = option(
        1.0, "weight of the pixel loss on the first view; 0: the broader-context loss alone", least=0
    )
    loss: Loss = option(
        "byol",
        "agreement loss: byol, the paper's; infonce with the other images of all processes as negatives; or sigreg "
        "(LeJEPA) or visreg, which have neither teacher nor negatives",
    )
    temperature: float | Literal["auto"] = option("auto", "τ of infonce; auto: 0.2", above=0)
    gaussian_weight: float | Literal["auto"] = option(
        "auto",
        "λ of sigreg and visreg: weight of the test for a Gaussian; that of the agreement is 1 - λ. auto: 0.05 for "
        "sigreg, 0.9 for visreg, or 0.6 below ViT-S",
        above=0,
        below=1,
    )
    directions: Size = option(
        "auto",
        "number of random directions of that test; auto: 1024 for sigreg, 4096 for visreg, or 256 below ViT-S",
        least=1,
    )
    normalized_pixels: bool | Literal["auto"] = option(
        "auto", "target pixels normalised within each patch; auto: true on mae, false on simmim"
    )
    mask_unit: Size = option(
        "auto", "side of a mask unit in pixels on simmim; auto: two patches. On mae it is one patch"
    )
    color: Coloring = option(
        "none",
        "colour changes: none, the same jitter for both views (shared), or independent ones (own); or, as in the "
        "authors' program, jitter and one of grey, solarised and blurred for the second view (second)",
    )
    momentum: float | Literal["auto"] = option(
        "auto",
        "momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short trainings",
        least=0,
        most=1,
    )
    head_width: Size = option(
        "auto",
        "hidden width of projection and prediction heads; auto: 4096, 2048 for sigreg and visreg, or 4 encoder widths "
        "below ViT-S",
    )
    decoder_width: Size = option("auto", "width of the decoder on mae; auto: 512, or the encoder's below ViT-S")
    decoder_depth: Size = option(
        "auto", "number of transformer blocks of the decoder on mae; auto: 8, or 2 below ViT-S"
    )
    decoder_heads: Size = option(
        "auto", "number of attention heads of the decoder on mae; auto: 16, or one per 32 channels below ViT-S"
    )


@dataclass(frozen=True)
class DistillOptions:
    """Prediction of a frozen teacher's features at patches that were replaced by a mask token."""

    features_of: str | None = option(None, "teacher (required): timm:NAME, a run's folder, or a file of weights")
    mask_ratio: float = option(
        0.4, "fraction of the patches that is replaced, each independently (EVA masks blocks)", least=0, below=1
    )
    loss: FeatureLoss = option("cosine", "loss on the features: cosine, as in EVA, or smooth_l1, as in MaskDistill")
    features_model: str | None = option(
        None, "timm's name of the teacher's model, if features_of is a file of weights alone"
    )


@dataclass(frozen=True)
class LatentOptions:
    """Prediction of hidden layers of a moving-average teacher, which sees the whole image, at masked patches."""

    layers: list[int] | Literal["auto"] = option(
        "auto", "numbers of the predicted blocks, counted from 1; auto: those at each quarter of the depth"
    )
    combine: Combine = option("each", "each of the layers (each), or their mean (mean)")
    source: LayerOutput = option("block", "tokens after a block (block), or the output of its MLP (mlp)")
    sampling: MaskSampling = option(
        "blocks",
        "masks: blocks to predict, and a context without them (blocks); 3x3 visible blocks (inverse); or random "
        "patches (random)",
    )
    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction of the patches that is removed; auto: what the blocks require, otherwise 0.8",
        least=0,
        below=1,
    )
    masks: int = option(1, "number of masks per image, compared with one output of the teacher", least=1, most=1000)
    target_blocks: Size = option(
        "auto", "number of blocks to predict per mask, each separately; auto: 4, or fewer on small grids"
    )
    target_scale: float | Literal["auto"] = option(
        "auto", "fraction of the patches in each of these blocks; auto: 0.175", above=0, below=1
    )
    loss: HiddenLoss = option("smooth_l1", "loss on the features: smooth_l1, or mean squared error (mse)")
    momentum: float | Literal["auto"] = option(
        "auto",
        "momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short trainings",
        least=0,
        most=1,
    )
    decoder: Predictor = option(
        "transformer", "predictor: a transformer with mask tokens (transformer), or convolutions over the grid (conv)"
    )
    decoder_width: Size = option("auto", "width of the predictor; auto: 384, conv: 768; the encoder's below ViT-S")
    decoder_depth: Size = option("auto", "number of blocks of the predictor; auto: 6, or 2 below ViT-S")
    decoder_heads: Size = option(
        "auto", "number of attention heads of a transformer; auto: 12, or one per 32 channels below ViT-S"
    )


@dataclass(frozen=True)
class DIETOptions:
    """Classification of views: which image of the training set is it? For small sets, one class per image."""

    images: int | Literal["auto"] = option(
        "auto", "number of training images, one class each; auto: as many as there are, up to 65,536", least=1
    )
    smoothing: float = option(
        0.8, "label smoothing, the share of the target that is spread over all images", least=0, below=1
    )
    color: Color = option("own", "colour changes of a view: none, or random ones as ExtreMA's (own)")


@dataclass(frozen=True)
class JigsawOptions:
    """Prediction of the positions of patches that are seen without any position, after others were removed."""

    mask_ratio: float = option(0.5, "fraction of the patches that is removed", least=0, below=1)


@dataclass(frozen=True)
class PARTOptions:
    """Prediction of the translations between patches that are cut at random places, off any grid."""

    pairs: Size = option(
        "auto",
        "number of pairs of patches, drawn without replacement from all n² and shared by a step's images; auto: an "
        "eighth of n², as in the program on ImageNet, but at least 2,048, or all if there are fewer",
    )
    head: Head = option(
        "attention",
        "cross-attention from every pair to all patches with one head (attention), or a linear layer (linear)",
    )
    context_mask_ratio: float = option(
        0.0, "fraction η of the patches that are queries only, neither keys nor values, as in MP3", least=0, below=1
    )


@dataclass(frozen=True)
class LOCAOptions:
    """Location of the patches of a query crop, seen without positions, in a reference crop that a teacher sees."""

    mask_ratio: float = option(0.64, "fraction of the query's patches that is removed", least=0, below=1)
    context_ratio: float = option(
        0.2, "fraction of the reference's patches, consecutive ones, that the head sees", above=0, most=1
    )
    momentum: float | Literal["auto"] = option(
        "auto",
        "momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short trainings",
        least=0,
        most=1,
    )


@dataclass(frozen=True)
class NEPAOptions:
    """Prediction of the embedding of the next patch, row by row, from the patches before it (causal attention)."""


@dataclass(frozen=True)
class MixtureOptions:
    """Composed task: any withholdings and any weighted questions."""

    withhold: dict[str, float] | Literal["auto"] = option(
        "auto",
        "withholdings and their strengths. mask takes the fraction of the patches that is removed; blank, "
        "drop_positions and limit_context the fractions of the others that lose content, position, or their use as "
        "keys and values; no patch loses both content and position. One of zoom_in, zoom_out (fraction of the side), "
        "fisheye (twist), wave (amplitude), blur (side of the kernel) and decolorize (fraction of the colour that "
        "stays) degrades the image first. auto: mask 0.5 and drop_positions 0.75",
    )
    ask: dict[str, float] | Literal["auto"] = option(
        "auto",
        "questions and their weights: pixels, positions, agreement, features; the first one is reported. auto: pixels "
        "and positions, 1 each",
    )
    teacher: Second | Literal["auto"] = option(
        "auto",
        "teacher's view for agreement: the student's crop (same), a second crop (second), or none; auto: same with "
        "agreement, else none",
    )
    masks: int = option(1, "number of disjoint masks per image, as in ExtreMA; each leaves what mask does not remove")
    crop: Sharing | Literal["auto"] = option(
        "auto", "crop of the two views of ``teacher`` second: one each (auto: own), or one for both (shared)"
    )
    color: Coloring | Literal["auto"] = option(
        "auto",
        "colour changes of these views: none (auto), the same for both (shared), or independent ones (own); or those "
        "of LUT's second view (second)",
    )
    class_token: Representation = option(
        "mean",
        "image representation for agreement: the mean of the patch tokens (mean), the encoder's own class token "
        "(vit), or a class token in class-attention blocks after the encoder (cait), as in ExtreMA",
    )
    attention_blocks: Size = option("auto", "number of class-attention blocks of cait; auto: 2", least=1)
    agreement_loss: Loss = option(
        "byol", "byol, infonce, or sigreg or visreg without a teacher, as ``loss`` of extrema"
    )
    infonce_temperature: float | Literal["auto"] = option("auto", "τ of infonce; auto: 0.2", above=0)
    gaussian_weight: float | Literal["auto"] = option("auto", "λ of sigreg and visreg, as in extrema", above=0, below=1)
    directions: Size = option("auto", "number of random directions of sigreg and visreg, as in extrema", least=1)
    sigma: float = option(1.0, "σ of position smoothing at the start, as in DropPos", least=0)
    sigma_end: float = option(0.0, "σ at the end of the training, reached linearly; equal to ``sigma``: constant")
    position_temperature: float = option(
        inf, "τ of attentive reconstruction, as in DropPos (there 0.1); inf weighs all patches alike", above=0, most=inf
    )
    momentum: float | Literal["auto"] = option(
        "auto",
        "momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short trainings",
        least=0,
        most=1,
    )
    head_width: Size = option(
        "auto", "hidden width of the agreement heads; auto: 4096, or 4 encoder widths below ViT-S"
    )
    head_out: Size = option(
        "auto", "output width of the agreement heads; auto: 256, or the encoder's width below ViT-S"
    )
    decoder_width: Size = option("auto", "width of the decoders; auto: 512, or the encoder's below ViT-S")
    decoder_depth: Size = option("auto", "number of blocks of the pixel decoder; auto: 8, or 2 below ViT-S")
    decoder_heads: Size = option(
        "auto", "number of attention heads of the decoders; auto: 16, or one per 32 channels below ViT-S"
    )
    position_depth: Size = option("auto", "number of blocks of the position decoder; 0: linear, as in MP3; auto: 2")
    features_of: str | None = option(
        None, "frozen teacher of features: timm:NAME, a run's folder, or a file of weights"
    )
    features_model: str | None = option(
        None, "timm's name of that teacher's model, if features_of is a file of weights alone"
    )
    feature_loss: FeatureLoss | Literal["auto"] = option(
        "auto", "loss on the features: cosine or smooth_l1; auto: cosine"
    )
    canvas: Size = option(
        "auto",
        "shorter side in pixels of the image before zoom_in, fisheye or wave, as in restore; auto: the input's. "
        "zoom_in is then the input's fraction of it, such as 0.7 for 224 of 320",
    )
    canvas_fit: CanvasFit | Literal["auto"] = option(
        "auto", "reduction of a larger canvas to the input after fisheye or wave: resize (auto), or crop"
    )
    band_weight: float | Literal["auto"] = option(
        "auto",
        "fraction of the pixel loss on the band around the input, with mask and zoom_in on a canvas; the rest is on "
        "the masked patches. auto: 0.2",
        least=0,
        most=1,
    )
    band_target: BandTarget | Literal["auto"] = option(
        "auto", "target of the band, as in restore: grown (auto) or original"
    )
    zoom_place: CropPlace | Literal["auto"] = option(
        "auto", "part that zoom_in shows: the centre (auto), or one at a random place"
    )
    fill: Padding | Literal["auto"] = option(
        "auto", "surroundings of zoom_out's small copy: its mirror images (auto), black, or patches of other images"
    )
    kernel_init: KernelInit | Literal["auto"] = option(
        "auto", "weights of blur's kernels: normal around the mean (auto), or around 0 as in kaiming or xavier"
    )
    kernel_of: KernelOf | Literal["auto"] = option(
        "auto", "one blur kernel per channel of an image (auto: channel), or one for all channels (image)"
    )
