"""Download of the benchmarks' data: layouts, subsets and local archives, without a network."""

import tarfile
from pathlib import Path

import get_data
import pytest


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_camvid_is_laid_out_by_the_lists_of_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(address: str, folder: Path) -> Path:
        assert address == get_data.CAMVID
        for part in ("train", "val", "test"):
            pairs = [(f"CamVid/{part}/{i}.png", f"CamVid/{part}annot/{i}.png") for i in range(2)]
            lines = "\n".join(f"/SegNet/{frame} /SegNet/{label}" for frame, label in pairs)
            write(folder / "CamVid" / f"{part}.txt", lines)
            for path in (path for pair in pairs for path in pair):
                write(folder / path, path)
        return folder

    monkeypatch.setattr(get_data, "clone", clone)
    get_data.main(["camvid", str(tmp_path)])
    found = sorted(path.relative_to(tmp_path / "camvid").as_posix() for path in (tmp_path / "camvid").rglob("*.png"))
    assert found == sorted(
        f"{k}/{p}/{i}.png" for k in ("images", "labels") for p in ("train", "val", "test") for i in (0, 1)
    )
    assert (tmp_path / "camvid/labels/val/1.png").read_text() == "CamVid/valannot/1.png"


def test_raccoons_keep_the_layout_of_their_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(address: str, folder: Path) -> Path:
        assert address == get_data.RACCOON
        write(folder / "images/raccoon-1.jpg")
        write(folder / "annotations/raccoon-1.xml")
        write(folder / "README.md")
        return folder

    monkeypatch.setattr(get_data, "clone", clone)
    get_data.main(["raccoon", str(tmp_path)])
    assert sorted(path.name for path in (tmp_path / "raccoon").iterdir()) == ["annotations", "images"]


@pytest.mark.parametrize("top", ["", "cifar5k/"])
def test_a_local_archive_takes_the_place_of_a_download(
    top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_data, "SUBSET", {"train": 2, "test": 1})
    for part in ("train", "test"):
        for i in range(3):
            write(tmp_path / "source" / part / "cat" / f"{i:04d}.jpg")
    with tarfile.open(tmp_path / "cifar.tar", "w") as archive:
        for part in ("train", "test"):
            archive.add(tmp_path / "source" / part, f"{top}{part}")
    get_data.main(["cifar5k", str(tmp_path / "data"), "--from", str(tmp_path / "cifar.tar")])
    found = sorted(path.name for path in (tmp_path / "data/cifar5k").rglob("*.jpg"))
    assert found == ["0000.jpg", "0000.jpg", "0001.jpg"]
    with pytest.raises(SystemExit, match="exists"):
        get_data.main(["cifar5k", str(tmp_path / "data")])


def test_the_keywords_are_described(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--from"):
        get_data.main(["keywords", str(tmp_path)])
