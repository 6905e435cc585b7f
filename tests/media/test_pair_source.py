"""`Files` of tuples, and `FolderPairs`."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest

import aiofeed
from aiofeed import EncodedCache, Feeder, Files, FolderPairs, Source
from tests.support.fault_server import FaultServer


def written(root: Path, *names: str) -> list[Path]:
    """Files whose contents are their names."""
    paths = [root / name for name in names]
    for path, name in zip(paths, names, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return paths


def test_a_sample_is_a_tuple_of_bytes(tmp_path: Path) -> None:
    """Each tuple of paths is a sample, whatever the size of groups, by all ways of reading."""
    paths = written(tmp_path, *[f"{number}.{kind}" for number in range(30) for kind in ("a", "b", "c")])
    source = Files([paths[at : at + 3] for at in range(0, 90, 3)], range(30))
    expected = [tuple(f"{number}.{kind}".encode() for kind in "abc") for number in range(30)]
    assert isinstance(source, Source)
    assert (len(source), repr(source), source.target(7)) == (30, "Files(30 samples)", 7)
    for seconds in (0.0, 1e-6, 10.0):
        source._seconds_per_file = seconds
        assert asyncio.run(source.read_many(range(30))) == expected
        assert asyncio.run(source.read_many([4, 2])) == [expected[4], expected[2]]
    assert source.read_now([5, 3]) == [expected[5], expected[3]]
    assert asyncio.run(source.read(9)) == expected[9]
    assert source.key(1) == " + ".join(str(tmp_path / f"1.{kind}") for kind in "abc")
    assert [asyncio.run(pickle.loads(pickle.dumps(source)).read(0))] == expected[:1]


def test_a_missing_file_fails_its_own_sample(tmp_path: Path) -> None:
    """The error of a sample is that of its first file that cannot be read, and the key names all its files."""
    a, b = written(tmp_path, "a", "b")
    source = Files([(a, b), (a, tmp_path / "missing"), (b, a)])
    whole, error, last = asyncio.run(source.read_many(range(3)))
    assert (whole, last) == ((b"a", b"b"), (b"b", b"a"))
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        asyncio.run(source.read(1))
    with pytest.raises(
        aiofeed.errors.ReadError, match=rf"cannot read '{a} \+ {tmp_path}/missing'.*No such file.*missing"
    ):
        list(Feeder(source, decode=len, batch_size=1))
    [lengths] = Feeder(source, decode=len, batch_size=3, on_error="skip")
    assert lengths.tolist() == [2, 2]


def test_a_root_is_above_all_files(tmp_path: Path) -> None:
    """`root` is joined to each path of a tuple, and no path leads out of it."""
    written(tmp_path, "i/1", "m/1")
    source = Files([("i/1", "m/1")], root=tmp_path)
    assert asyncio.run(source.read(0)) == (b"i/1", b"m/1")
    with pytest.raises(ValueError, match=r"\.\."):
        Files([("i/1", "../m/1")], root=tmp_path)


def test_wrong_tuples_are_errors(tmp_path: Path) -> None:
    """Tuples of other lengths, entries that are no tuples and wrong numbers of targets name the entry."""
    with pytest.raises(ValueError, match=r"number 0 has 2 paths, number 2 has 3: \('a', 'b', 'c'\)"):
        Files([("a", "b"), ("a", "b"), ("a", "b", "c")])
    with pytest.raises(ValueError, match="number 0 has 0 paths"):
        Files([()])
    with pytest.raises(TypeError, match="needs tuples of paths, as number 0 is; number 1 is 'a'"):
        Files([("a", "b"), "a"])
    with pytest.raises(TypeError, match=r"needs paths as str or os.PathLike; number 1 is \('a', 'b'\)"):
        Files(["a", ("a", "b")])
    with pytest.raises(TypeError, match="needs paths as str"):
        Files([("a", 3)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 samples, but 4 targets"):
        Files([("a", "b"), ("c", "d")], targets=[1, 2, 3, 4])


def test_an_encoded_cache_notices_a_changed_mask(tmp_path: Path) -> None:
    """The version of a sample has the versions of all its files."""
    image, mask = written(tmp_path, "image", "mask")
    cache, hits = EncodedCache(tmp_path / "cache", 1 << 20), []
    for expected in ("imagemask", "imagemask", "imageanother"):
        if expected == "imageanother":
            mask.write_bytes(b"another")
        source = Files([(image, mask)])
        with Feeder(source, decode=lambda files: b"".join(files).decode(), cache=cache, batch_size=1) as feeder:
            assert list(feeder) == [[expected]]
            hits.append(feeder.statistics().storage.cache_hits)
    assert hits == [0, 1, 0]


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    """Images and masks of one path below their folders are a sample; other files are ignored."""
    names = ["b/2.JPG", "b/1.png", "a.jpeg", "c/d/3.webp"]
    written(tmp_path / "images", *names, "notes.txt")
    written(tmp_path / "masks", "b/2.png", "b/1.png", "a.GIF", "c/d/3.tif", "list.json")
    source = FolderPairs(tmp_path / "images", str(tmp_path / "masks"))
    assert source.names == ["a", "b/1", "b/2", "c/d/3"]
    assert repr(source) == "FolderPairs(4 samples)"
    assert asyncio.run(source.read_many(range(4))) == [
        (b"a.jpeg", b"a.GIF"),
        (b"b/1.png", b"b/1.png"),
        (b"b/2.JPG", b"b/2.png"),
        (b"c/d/3.webp", b"c/d/3.tif"),
    ]
    assert source.target is None


def test_boxes_are_targets(tmp_path: Path) -> None:
    """Boxes go by the path of the image; a dict is the target itself."""
    written(tmp_path / "images", "s/1.jpg", "2.jpg")
    written(tmp_path / "masks", "s/1.png", "2.png")
    boxes = {"s/1.jpg": [[0, 0, 1, 1]], "2.jpg": {"boxes": [], "labels": []}, "other.jpg": []}
    source = FolderPairs(tmp_path / "images", tmp_path / "masks", boxes)
    assert [source.target(at) for at in range(2)] == [{"boxes": [], "labels": []}, {"boxes": [[0, 0, 1, 1]]}]
    with pytest.raises(ValueError, match=r"has no boxes of 1 images: '2.jpg'; pass \[\] for none"):
        FolderPairs(tmp_path / "images", tmp_path / "masks", {"s/1.jpg": []})
    with pytest.raises(TypeError, match=r"boxes=\) must be a dict of boxes by the path"):
        FolderPairs(tmp_path / "images", tmp_path / "masks", [[]])  # type: ignore[arg-type]


def test_files_without_a_partner_are_listed(tmp_path: Path) -> None:
    """Images without a mask, masks without an image and names with two extensions are errors that list them."""
    images, masks = tmp_path / "images", tmp_path / "masks"
    written(images, *[f"{number}.jpg" for number in range(9)])
    written(masks, "3.png")
    with pytest.raises(ValueError, match=r"have 8 images without a mask: '0', '1', '2', '4', '5', \.\.\.; .*Files\("):
        FolderPairs(images, masks)
    written(masks, *[f"{number}.png" for number in range(9)], "x/1.png")
    with pytest.raises(ValueError, match="have 1 masks without an image: 'x/1';"):
        FolderPairs(images, masks)
    written(images, "x/1.jpg", "7.png")
    with pytest.raises(ValueError, match=r"7\.(png|jpg)' and '.*7\.(png|jpg)' differ in their extension only"):
        FolderPairs(images, masks)


def test_missing_and_empty_folders_are_errors(tmp_path: Path) -> None:
    """The message names the folder."""
    written(tmp_path / "images", "1.jpg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the folder '.*/mask' does not exist; '.*' exists and has no 'mask'"):
        FolderPairs(tmp_path / "images", tmp_path / "mask")
    with pytest.raises(FileNotFoundError, match=r"'.*/empty' has no images \(\.jpg, .*\.gif\)"):
        FolderPairs(tmp_path / "images", tmp_path / "empty")
    with pytest.raises(TypeError, match=r"no argument 'targets'.*pass boxes="):
        FolderPairs(tmp_path / "images", tmp_path / "images", targets=[1])  # type: ignore[call-arg]


def test_links_are_left_out_on_request(tmp_path: Path) -> None:
    """With `follow_symlinks=False` linked files are no samples."""
    images, masks = tmp_path / "images", tmp_path / "masks"
    written(images, "1.jpg")
    written(masks, "1.png")
    (images / "2.jpg").symlink_to(images / "1.jpg")
    (masks / "2.png").symlink_to(masks / "1.png")
    assert len(FolderPairs(images, masks)) == 2
    assert FolderPairs(images, masks, follow_symlinks=False).names == ["1"]


def test_folders_may_be_urls(object_server: FaultServer) -> None:
    """Images and masks below URLs are listed and paired as files are."""
    names = ["images/a/1.jpg", "images/2.png", "images/notes.txt", "masks/a/1.png", "masks/2.png"]
    object_server.objects.update({f"bucket/{name}": name.encode() for name in names})
    urls = "s3://bucket/images/", "s3://bucket/masks"
    source = FolderPairs(*urls, options=object_server.options)
    assert source.names == ["2", "a/1"]
    assert source.key(1) == "s3://bucket/images/a/1.jpg + s3://bucket/masks/a/1.png"
    feeder = Feeder(source, decode=lambda files: b" ".join(files).decode(), batch_size=2)
    assert list(feeder) == [["images/2.png masks/2.png", "images/a/1.jpg masks/a/1.png"]]
    del object_server.objects["bucket/masks/2.png"]
    with pytest.raises(ValueError, match="have 1 images without a mask: '2'"):
        FolderPairs(*urls, options=object_server.options, refresh=True)
