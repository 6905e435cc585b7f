"""Images of OME-Zarr: the scale that ``Arrays`` reads, and the names of axes, by the metadata of the group."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from tests.support.arrays import assert_same
from tests.support.fault_server import files_of

zarr = pytest.importorskip("zarr", minversion="3")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")

X = np.random.default_rng(0).integers(0, 999, (3, 2, 16, 24), "u2")
AXES: list[Any] = [{"name": "t", "type": "time"}, {"name": "c"}, {"name": "y"}, {"name": "x"}]


def image(path: Path, version: str, values: Any = X, **known: Any) -> str:
    """Write an image with two scales, as ome-zarr-py does: https://ngff.openmicroscopy.org/0.5/#multiscale-md."""
    datasets = [{"path": f"scale{at}", "coordinateTransformations": []} for at in range(2)]
    multiscales = {"multiscales": [{"axes": AXES, "datasets": datasets, "name": "image", **known}]}
    attributes = {"ome": {"version": "0.5", **multiscales}} if version == "0.5" else multiscales
    group = zarr.create_group(path, zarr_format=3 if version == "0.5" else 2, attributes=attributes)
    names = {"dimension_names": ["t", "c", "y", "x"]} if version == "0.5" else {}
    for at, data in enumerate((values, values[..., ::2, ::2])):
        group.create_array(f"scale{at}", data=data, chunks=(1, 1, 8, 8), **names)
    return str(path)


def epoch(source: Any) -> Any:
    with aiofeed.Feeder(source, batch_size=5) as feeder:
        return np.concatenate([batch["x"].numpy() for batch in feeder])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_scales_by_their_metadata(version: str, tmp_path: Path) -> None:
    """The largest one by default; axes have the names of the metadata."""
    path = image(tmp_path / "plate.zarr", version)
    assert_same(epoch(aiofeed.Arrays({"x": path}, sample="t")), X)
    small = X[..., ::2, ::2]
    for scale in (1, -1):
        assert_same(epoch(aiofeed.Arrays({"x": path}, sample="t", scale=scale)), small)
    tiles = aiofeed.Arrays({"x": path}, sample="t", scale=1, tile={"y": 4, "x": 4}, select={"c": 1})
    assert len(tiles) == 3 * 2 * 3
    assert tiles.position(0) == {"t": 0, "y": 0, "x": 0}
    found = {tuple(tiles.position(at).values()): sample for at, sample in enumerate(epoch(tiles))}
    for (t, y, x), sample in found.items():
        assert_same(sample, small[t, 1, y : y + 4, x : x + 4])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_several_images(version: str, tmp_path: Path) -> None:
    """Of a plate: the fields of its wells by a glob, joined along the first axis of samples."""
    for at, well in enumerate(("A/1", "A/2", "B/1")):
        image(tmp_path / "plate.zarr" / well / "0", version, X + at)
    found = epoch(aiofeed.Arrays({"x": f"{tmp_path}/plate.zarr/*/*/0"}, sample="t", scale=1))
    assert_same(found, np.concatenate([(X + at)[..., ::2, ::2] for at in range(3)]))


def test_images_at_urls(tmp_path: Path, server: Any) -> None:
    """As on disk."""
    pytest.importorskip("obstore")
    image(tmp_path / "plate.zarr", "0.5")
    server.objects = files_of(tmp_path)
    assert_same(epoch(aiofeed.Arrays({"x": "s3://bucket/plate.zarr"}, sample="t", options=server.options)), X)


@pytest.mark.parametrize("scale", [2, -3, "0", None])
def test_scales_that_there_are_not(scale: Any, tmp_path: Path) -> None:
    """An error that lists those that there are."""
    path = image(tmp_path / "plate.zarr", "0.4")
    with pytest.raises(ValueError, match=r"plate\.zarr has no scale .*only .*scale0.*scale1"):
        aiofeed.Arrays({"x": path}, sample="t", scale=scale)


@pytest.mark.parametrize("known", [{"datasets": None}, {"datasets": [{}]}, {"axes": 5}, {"axes": [{}]}])
def test_damaged_metadata(known: Any, tmp_path: Path) -> None:
    """An error that names the image."""
    path = image(tmp_path / "plate.zarr", "0.5", **known)
    with pytest.raises(ValueError, match=r"plate\.zarr has no scale 0, only"):
        aiofeed.Arrays({"x": path}, sample="t")


def plate(path: Path, version: str, wells: Any = ("B/3", "A/1", "A/12"), fields: Any = ("0", "f_1")) -> list[Any]:
    """Write a plate as https://ngff.openmicroscopy.org/0.5/#plate-md describes it; images differ in height."""
    found = []

    def group(path: Path, **known: Any) -> None:
        attributes = {"ome": {"version": "0.5", **known}} if version == "0.5" else known
        zarr.create_group(path, zarr_format=3 if version == "0.5" else 2, attributes=attributes)

    group(path, plate={"wells": [{"path": well, "rowIndex": 0, "columnIndex": 0} for well in wells]})
    for well in wells:
        group(path / well, well={"images": [{"path": field} for field in fields]})
        for field in fields:
            found.append(X[..., : 8 + len(found), :] + 1000 * len(found))
            image(path / well / field, version, found[-1])
    return found


@pytest.mark.parametrize("place", ["disk", "URL"])
@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_plates(version: str, place: str, tmp_path: Path, server: Any) -> None:
    """All images of all wells in the order of the metadata; coordinates and keys name the well and the field."""
    values = plate(tmp_path / "plate.zarr", version)
    path, options = str(tmp_path / "plate.zarr"), None
    if place == "URL":
        pytest.importorskip("obstore")
        server.objects, path, options = files_of(tmp_path), "s3://bucket/plate.zarr", server.options
    arguments: dict[str, Any] = {"sample": (), "tile": {"y": 8, "x": 8}, "options": options}
    source = aiofeed.Arrays({"x": path}, **arguments)
    names = ["B/3/0", "B/3/f_1", "A/1/0", "A/1/f_1", "A/12/0", "A/12/f_1"]
    assert len(source) == 6 * 3
    for index, sample in enumerate(epoch(source)):
        position = source.position(index)
        assert source.coords(index)["image"] == names[position["image"]]
        assert source.at(names[position["image"]], y=0, x=position["x"]) == index
        assert f"plate.zarr/{names[position['image']]}/scale0[" in source.key(index)
        assert_same(sample, values[position["image"]][..., :8, position["x"] : position["x"] + 8])
    assert len({source.key(index) for index in range(len(source))}) == len(source)
    well = aiofeed.Arrays({"x": f"{path}/A/1"}, **arguments)
    assert [well.coords(index)["image"] for index in (0, 3)] == ["0", "f_1"]
    assert_same(epoch(well), epoch(source)[6:12])
    several = aiofeed.Arrays({"x": [f"{path}/A/1", f"{path}/A/12"]}, **arguments)
    assert_same(epoch(several), epoch(source)[6:])
    if place == "disk":
        by_glob = aiofeed.Arrays({"x": f"{path}/*/*/*"}, **arguments)
        assert_same(epoch(by_glob), np.concatenate([epoch(source)[6:], epoch(source)[:6]]))
    by_time = aiofeed.Arrays({"x": path}, **{**arguments, "sample": "t"})
    assert len(by_time) == 3 * len(source)
    assert "plate.zarr/B/3/f_1/scale0[t=2" in by_time.key(by_time.at(5, y=0, x=0))


@pytest.mark.parametrize(
    "damaged",
    [{"plate": {}}, {"plate": None}, {"plate": {"wells": []}}, {"well": {"images": [{"at": 0}]}}, {"well": 5}],
)
def test_damaged_plates(damaged: Any, tmp_path: Path) -> None:
    """An error that names the plate or the well."""
    zarr.create_group(tmp_path / "plate.zarr", zarr_format=2, attributes=damaged)
    with pytest.raises(ValueError, match=r"plate\.zarr is a (plate|well) without images"):
        aiofeed.Arrays({"x": str(tmp_path / "plate.zarr")}, sample=())


def test_images_of_a_plate_that_there_are_not(tmp_path: Path) -> None:
    """An error that names the image, not a plate with fewer ones."""
    plate(tmp_path / "plate.zarr", "0.5", fields=("0",))
    shutil.rmtree(tmp_path / "plate.zarr" / "A" / "1" / "0")
    with pytest.raises(FileNotFoundError, match=r"plate\.zarr/A/1/0"):
        aiofeed.Arrays({"x": str(tmp_path / "plate.zarr")}, sample=(), tile={"y": 8, "x": 8})
