"""What is seen on each kind of picture that a run's folder may hold, and what to look for."""

from __future__ import annotations

from typing import NamedTuple

from patchloom.sound import Sound, in_words


class Caption(NamedTuple):
    """A title of a few words, and one or two sentences: what is seen, and what to look for."""

    title: str
    text: str


# by the beginning of the file's name, the longest first that fits; docs/look.md tells more of each
_CAPTIONS = {
    "recovered": Caption(
        "What was withheld, and what came back",
        "Hatched patches were hidden from the encoder. Look whether edges go on across holes and things are completed; "
        "where a hole has the texture of its neighbours alone, a blurred copy would do as well.",
    ),
    "positions": Caption(
        "Patches that were put where they belong",
        "Patches whose position was withheld stand at their true place where it was found; where it was not, it is "
        "hatched. The more is there, the more of the parts was understood.",
    ),
    "rebuilt": Caption(
        "Images put together again",
        "Every patch stands where the network placed it. An image that is right up to a shift, or mirrored, tells that "
        "its parts were understood and their absolute place was not.",
    ),
    "mixed": Caption(
        "Two images, shuffled together",
        "Patches of two images are dealt into two sets and placed. If what belongs to one image comes together, its "
        "patches leave the stranger's out.",
    ),
    "views": Caption(
        "What a training step sees",
        "The teacher's view of an image, and the student's with masked patches hatched. You, too, should be able to "
        "tell that they belong together; else the setting is too hard.",
    ),
    "neighbours": Caption(
        "Nearest images in training",
        "Beside each image those that its features are nearest to. If all rows show the same, the features have "
        "collapsed; if they share colour alone, colour is what was learnt.",
    ),
    "features": Caption(
        "The teacher's features, and the answer",
        "Patches of one colour are alike to the teacher. Where the answers are the same in all rows, only the mean "
        "feature was learnt.",
    ),
    "components": Caption(
        "Three principal components of features",
        "Patches of one colour are alike to the encoder. Look whether things keep their colour from image to image, or "
        "colours tell above all where a patch is.",
    ),
    "attention": Caption(
        "What patches attend to",
        "A map for each block and head of what the marked patch attends to. Look for heads that keep to a thing or a "
        "part; flat maps tell nothing.",
    ),
    "attention-mean": Caption(
        "What patches attend to, by the mean of heads",
        "A map for each marked patch, framed in its colour. Look whether it keeps to the thing on which the patch "
        "lies.",
    ),
    "relative": Caption(
        "Attention by offset",
        "How much patches attend to others by the way from one to the other, a map for each head. A dot is a local "
        "head; an even map looks everywhere.",
    ),
    "distances": Caption(
        "How far attention reaches",
        "The mean distance of what is attended to, from block to block, beside the untrained encoder.",
    ),
    "correlation": Caption(
        "What is like a patch",
        "How alike the marked patch is to all others, in its image and in the next. Look whether it finds its kind, or "
        "only its brightness.",
    ),
    "correlation-positions": Caption(
        "Every pair of positions",
        "How alike features at two positions are, averaged over images: within an image, and across two. Maps that are "
        "bright around their own position tell of position; more within than across tells of content.",
    ),
    "depth": Caption(
        "Features from block to block",
        "Frequencies, effective rank and likeness of features along the blocks, beside the untrained encoder. A rank "
        "that falls towards 1 is a collapse.",
    ),
    "nearest": Caption(
        "Nearest images by the encoder",
        "Beside each image its nearest others. Look what they have in common: the kind of thing, or colour and "
        "brightness alone. What the untrained encoder finds as well was not learnt.",
    ),
    "retrieval": Caption(
        "Nearest crops",
        "Of crops of several images those that are nearest to one. Look whether place and scale are found again in "
        "other images.",
    ),
    "exemplar": Caption(
        "What is like an image of your own",
        "In each image the crop that is most like it. Look whether the thing is found, and whether the frame fits.",
    ),
    "inversion": Caption(
        "Images that the encoder takes for these",
        "Pictures made to give the same features from a part of the patches. What comes back is what the "
        "features keep.",
    ),
    "position_map": Caption(
        "Where positions are found",
        "How often patches at each place are found, and by how far they are missed. Bright borders alone tell that "
        "frames, skies and floors are what was learnt.",
    ),
    "layers": Caption(
        "What each layer is good for",
        "Accuracy of a linear probe on each layer. A fall in the last blocks tells that these serve the pretext task.",
    ),
    "segment": Caption(
        "Label maps: the best and the worst test images",
        "The image, its label map and the model's. Look what is confused with what, and whether borders are kept.",
    ),
    "detect": Caption(
        "Objects: the best and the worst test images",
        "What is there, and what the model finds. Look for things that are missed, and for boxes around nothing.",
    ),
    "keywords": Caption(
        "Which words are taken for which",
        "Rows are the words that were said, columns the answers. Look for pairs off the diagonal.",
    ),
    "confusion": Caption(
        "Which classes are taken for which", "Rows are the true classes, columns the answers. Look for pairs off it."
    ),
}


def caption_of(stem: str, sound: Sound | None = None) -> Caption:
    """The caption of a picture by its file's name without suffix; one that is not known is called by its name.

    Args:
        stem: of the file.
        sound: of runs of recordings, whose words are used.
    """
    begins = [name for name in _CAPTIONS if stem == name or stem.startswith((f"{name}-", f"{name}_"))]
    if not begins:
        return Caption(stem, "")
    known = max(begins, key=len)
    rest = stem.removeprefix(known).strip("-_")
    title = f"{_CAPTIONS[known].title} ({rest})" if rest else _CAPTIONS[known].title
    return Caption(in_words(title, sound), in_words(_CAPTIONS[known].text, sound))
