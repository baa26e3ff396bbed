"""Fetch the data that the benchmarks name, once, in the folders that they expect.

    python benchmarks/get_data.py cifar10 /tmp/data                     # from torchvision's address, 170 MB
    python benchmarks/get_data.py cifar10 /tmp/data --from cifar10.tar  # an archive that is at hand

An archive holds the folders as they are to lie below the place. CIFAR-10 is written as PNG, which loses nothing; the
results in README.md came from JPEG copies, so that figures may differ by more than seeds. For the other sets, whose
owners ask for a visit to their page, the address and the layout are printed.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from pathlib import Path

ELSEWHERE = {
    "camvid": (
        "CamVid (Brostow et al. 2009): 701 frames with labels, as 11 classes and void. Lay them out as "
        "images/{train,val,test}/NAME.jpg and labels/{train,val,test}/NAME.png, a class number a pixel"
    ),
    "raccoon": (
        "Raccoon (Tran 2017, MIT licence; GitHub datitran/raccoon_dataset): 200 photographs. Lay them out as "
        "images/NAME.jpg and annotations/NAME.xml, in Pascal VOC's form"
    ),
    "keywords": (
        "Arabic Speech Commands (Ghandoura et al. 2021, CC BY 4.0): 15 of its words, 300 recordings each. Lay them out "
        "as WORD/SPEAKER_NO_TAKE.flac with validation_list.txt and testing_list.txt, as Google's Speech Commands"
    ),
}


def cifar10(place: Path) -> None:
    """Write CIFAR-10 as ``train/CLASS/NNNN.png`` and ``test/CLASS/NNNN.png`` below a folder."""
    from torchvision.datasets import CIFAR10

    for part in ("train", "test"):
        # the archive stays beside the images: a download that fails leaves nothing in their folder
        images = CIFAR10(str(place.with_name("cifar10-archive")), train=part == "train", download=True)
        counts = dict.fromkeys(images.classes, 0)
        for image, label in images:
            name = images.classes[label]
            folder = place / part / name
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{counts[name]:04d}.png")
            counts[name] += 1


def main() -> None:
    """Fetch a data set, or unpack an archive of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["cifar10", *ELSEWHERE])
    parser.add_argument("place", type=Path, help="folder; the data are put below it")
    parser.add_argument("--from", dest="archive", type=Path, help="a tar archive that is at hand")
    given = parser.parse_args()
    place = given.place / given.name
    if place.exists():
        sys.exit(f"{place} is there already: remove it, or name another folder")
    if given.archive is not None:
        with tarfile.open(given.archive) as archive:
            top = {Path(name).parts[0] for name in archive.getnames()}
            archive.extractall(given.place if top == {given.name} else place, filter="data")
    elif given.name in ELSEWHERE:
        sys.exit(f"{ELSEWHERE[given.name]}, below {place}, or give an archive of that with --from")
    else:
        cifar10(place)
    print(place)


if __name__ == "__main__":
    main()
