"""One small instance of each kind of source, with a model of its decoded samples that does not use aiofeed."""

from __future__ import annotations

import functools
import importlib.util
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import aiofeed
from aiofeed.kernel.core.types import Traits
from tests.support.fault_server import FaultServer
from tests.support.media_files import video
from tests.support.shard_files import tfrecord, write_mds, write_tar, write_zip
from tests.support.token_files import write_megatron, write_raw

N = 12
WIDTH = 4
X = np.arange(N * WIDTH).reshape(N, WIDTH)
"""A sample is a row, or has one."""
ALTERNATING = [half * 6 + at for at in range(6) for half in (0, 1)]
"""The order of a mixture of two halves."""
LEROBOT = Path(__file__).parents[1] / "data/lerobot/av1"


# --- the samples ---


def plain(value: Any) -> Any:
    """A decoded sample as nested tuples, which can be compared; an array with its dtype and shape."""
    if isinstance(value, Mapping):
        return tuple((name, plain(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, str | bytes):
        return value
    array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def samples_in(batch: Any) -> list[Any]:
    """The samples of a batch: of tensors, or lists of texts, in dicts and tuples."""
    if isinstance(batch, Mapping):
        parts = [samples_in(batch[name]) for name in batch]
        return [dict(zip(batch, row, strict=True)) for row in zip(*parts, strict=True)]
    if isinstance(batch, list | tuple) and not isinstance(batch[0], str | bytes):
        return list(zip(*map(samples_in, batch), strict=True))
    return list(batch)


def row_of(data: bytes) -> torch.Tensor:
    """Decode the bytes of a row."""
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


def dict_of(data: bytes) -> dict[str, torch.Tensor]:
    """Decode the bytes of a row as a row of a table."""
    return {"x": row_of(data)}


def pixels_of(data: bytes) -> torch.Tensor:
    """Decode a picture of one line, int64 [WIDTH]."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)), np.int64)[0])


def pair_of(data: tuple[bytes, bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode an image and its mask."""
    return pixels_of(data[0]), pixels_of(data[1])


def row_in(data: Any) -> torch.Tensor:
    """Decode a row of whatever a source of bytes reads."""
    if isinstance(data, Mapping):
        return column_of(data)
    data = data[0] if isinstance(data, tuple) else data
    return pixels_of(data) if data.startswith(b"\x89PNG") else row_of(data)


def column_of(row: Mapping[str, Any]) -> torch.Tensor:
    """Return the tokens of a row of a table."""
    return torch.from_numpy(np.array(row["x"], np.int64))


def cells_of(row: Mapping[str, int]) -> torch.Tensor:
    """Return the numbers of a row of a CSV file."""
    return torch.tensor(list(row.values()))


# --- sources of one's own ---


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A ``Dataset`` of rows."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(X[index])


class RowStream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The rows without indices."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.from_numpy, X)


class Bytes:
    """A source of three methods."""

    def __len__(self) -> int:
        return N

    def key(self, index: int) -> str:
        return f"row {index}"

    async def read(self, index: int) -> bytes:
        return X[index].tobytes()


class OwnRows(Bytes):
    """A source of decoded samples, which reads them in the calling thread, too."""

    traits = Traits(decode="none")
    answers_at_once = True

    def read_now(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.from_numpy(X[list(indices)]))

    async def read(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.read_now([index])[0]


# --- the instances ---


@dataclass(frozen=True)
class EverySource:
    """How to make a source, given an empty folder and a server of objects, and what it gives.

    Args:
        make: Makes the source.
        traits: What the table of refusals says of it, separated by commas.
        decode: For ``Feeder(decode=)``.
        model: The decoded samples; ``None``: rows.
        needs: The modules that making it needs.
        order: The order of its samples without ``shuffle=``, if it is not that of the model.
    """

    make: Callable[[Path, Any], Any]
    traits: str
    decode: Callable[[Any], Any] | None = None
    model: Callable[[Any], Sequence[Any]] | None = None
    needs: tuple[str, ...] = ()
    order: Sequence[int] | None = None

    @property
    def kinds(self) -> set[str]:
        """What the table of refusals calls it."""
        kinds = set(self.traits.split(", "))
        others = {"a stream": "samples with indices", "shards": "samples in no shards"}
        others |= {"samples with targets": "samples without targets", "a Dataset of tuples": "a Dataset of tensors"}
        others |= {"Tokens with targets": "Tokens without targets"}
        known = {
            "Table",
            "Mixture of rows",
            "Arrays",
            "Tokens",
            "Documents",
            "Tokens with targets",
            "Episodes",
            "Episodes with a camera",
            "a stream",
        }
        others |= {kind: "samples of unknown length" for kind in known if kinds.isdisjoint(known)}
        return kinds | {name for kind, name in others.items() if kind not in kinds}

    def samples(self, source: Any) -> list[Any]:
        """The model of a source: its samples in order."""
        return list(map(plain, X if self.model is None else self.model(source)))


def _files(folder: Path, _: Any = None) -> aiofeed.Files:
    for number, row in enumerate(X):
        (folder / f"{number:02}.bin").write_bytes(row.tobytes())
    return aiofeed.Files(sorted(folder.glob("*.bin")))


def _objects(_: Path, server: FaultServer) -> aiofeed.Files:
    server.objects.update({f"bucket/rows/{number:02}.bin": row.tobytes() for number, row in enumerate(X)})
    return aiofeed.Files([f"s3://bucket/rows/{number:02}.bin" for number in range(N)], options=server.options)


def _pictures(folder: Path, rows: Any = X) -> Path:
    for number, row in enumerate(rows):
        path = folder / "ab"[number * 2 // N] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(row[None].astype(np.uint8)).save(path)
    return folder


def _manifest(folder: Path, _: Any) -> aiofeed.Manifest:
    _files(folder)
    lines = [json.dumps({"path": f"{number:02}.bin", "label": number}) for number in range(N)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return aiofeed.Manifest(folder / "rows.jsonl", "path", "label")


def halves(source: Any) -> tuple[Any, Any]:
    """The first and the last six samples of a source."""
    return source[:6], source[6:]


def _members(name: str = "bin") -> list[tuple[str, bytes]]:
    return [(f"{number:02}.{name}", row.tobytes()) for number, row in enumerate(X)]


def _shards(folder: Path, write: Callable[[Path, Any], object], suffix: str) -> str:
    for number in range(3):
        write(folder / f"{number}.{suffix}", _members()[number * 4 :][:4])
    return f"{folder}/*.{suffix}"


def _mds(folder: Path, _: Any) -> aiofeed.MDSShards:
    columns = {"x": ("bytes", None)}
    write_mds(folder / "mds", [[[row.tobytes()] for row in X[at : at + 4]] for at in (0, 4, 8)], columns)
    return aiofeed.MDSShards(folder / "mds", data="x")


def _records(folder: Path, _: Any) -> aiofeed.TFRecordShards:
    for at in (0, 6):
        (folder / f"{at}.tfrecord").write_bytes(tfrecord([row.tobytes() for row in X[at : at + 6]]))
    return aiofeed.TFRecordShards(f"{folder}/*.tfrecord")


def _array_records(folder: Path, _: Any) -> aiofeed.ArrayRecordShards:
    from array_record.python.array_record_module import ArrayRecordWriter

    for at in (0, 6):
        writer = ArrayRecordWriter(str(folder / f"{at}.array_record"), "group_size:1")
        for row in X[at : at + 6]:
            writer.write(row.tobytes())
        writer.close()
    return aiofeed.ArrayRecordShards(f"{folder}/*.array_record")


def _litdata(folder: Path, _: Any) -> aiofeed.LitDataShards:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_size=5)
    for number, row in enumerate(X):
        cache[number] = {"x": row}
    cache.done()
    cache.merge()
    return aiofeed.LitDataShards(folder)


def _arrow(fixed: bool = True) -> Any:
    import pyarrow as pa

    return pa.table({"x": pa.array(X.tolist(), pa.list_(pa.int64(), WIDTH if fixed else -1))})


def _parquet(folder: Path) -> str:
    from pyarrow import parquet

    for at in (0, 6):
        parquet.write_table(_arrow(fixed=False)[at : at + 6], folder / f"{at}.parquet", row_group_size=3)
    return f"{folder}/*.parquet"


def _blocks(folder: Path, suffix: str) -> aiofeed.Table:
    for at in (0, 6):
        lines = [json.dumps({"x": row.tolist()}) for row in X[at : at + 6]]
        if suffix == "csv":
            lines = ["a,b,c,d", *(",".join(map(str, row)) for row in X[at : at + 6])]
        (folder / f"{at}.{suffix}").write_text("\n".join(lines))
    return aiofeed.Table(f"{folder}/*.{suffix}", in_memory=False)


def _arrow_file(folder: Path, _: Any) -> aiofeed.Table:
    import pyarrow as pa

    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, _arrow().schema) as writer:
        writer.write_table(_arrow())
    return aiofeed.Table(folder / "rows.arrow")


def _structured(_: Path, __: Any) -> aiofeed.Table:
    table = np.zeros(N, [("x", np.int64, (WIDTH,))])
    table["x"] = X
    return aiofeed.Table(table)


def _hf_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": X.tolist()})


def _hdf5(folder: Path, _: Any) -> aiofeed.Arrays:
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(3, WIDTH))
    return aiofeed.Arrays({"x": f"{folder}/rows.h5::x"})


def _netcdf(folder: Path, _: Any) -> aiofeed.Arrays:
    import h5netcdf

    with h5netcdf.File(folder / "rows.nc", "w") as file:
        file.dimensions = {"time": N, "x": WIDTH}
        file.create_variable("x", ("time", "x"), data=X)
    return aiofeed.Arrays({"x": f"{folder}/rows.nc::x"}, sample="time")


def _cells(folder: Path, _: Any) -> aiofeed.Arrays:
    """The first rows are in compressed columns of another order, the last ones in a file of Cell Ranger."""
    import h5py

    def compressed(group: Any, values: Any, names: Any) -> None:
        lines, across = values.nonzero()
        group["data"], group["indices"], group["indptr"] = (
            values[lines, across],
            across,
            np.searchsorted(lines, range(len(values) + 1)),
        )
        group.create_dataset(names, data=[f"gene {at}" for at in range(WIDTH)][:: -1 if "var" in names else 1])

    cut = N // 2
    with h5py.File(folder / "a.h5ad", "w") as file:
        file.create_group("var").attrs["_index"] = "name"
        file.create_group("X").attrs.update({"encoding-type": "csc_matrix", "shape": (cut, WIDTH)})
        compressed(file["X"], X[:cut, ::-1].T, "/var/name")
    with h5py.File(folder / "b.h5", "w") as file:
        group = file.create_group("matrix")
        compressed(group, X[cut:], "features/name")
        group["shape"], group["barcodes"] = [WIDTH, N - cut], [f"cell {at}" for at in range(N - cut)]
    return aiofeed.Arrays(
        {"x": [f"{folder}/a.h5ad::X", f"{folder}/b.h5"]}, select={"var": [f"gene {at}" for at in range(WIDTH)]}
    )


def _zarr(folder: Path, _: Any) -> aiofeed.Arrays:
    import zarr

    zarr.create_array(folder / "rows.zarr", data=X, chunks=(3, WIDTH))
    return aiofeed.Arrays({"x": f"{folder}/rows.zarr"})


def _images(folder: Path, _: Any) -> aiofeed.Arrays:
    import zarr

    # Rows as tiles of images of other widths, which have one tile each.
    for at, part in enumerate(np.split(X, [2, 7])):
        zarr.create_array(folder / f"{at}.zarr", data=np.pad(part, [(0, 0), (0, at)]), chunks=(3, WIDTH))
    return aiofeed.Arrays({"x": f"{folder}/*.zarr"}, tile={1: WIDTH})


@functools.cache
def _videos() -> list[bytes]:
    return [video(2 + 2 * number, preset="ultrafast") for number in range(N)]


def _clips(folder: Path, _: Any) -> aiofeed.Clips:
    for number, data in enumerate(_videos()):
        (folder / f"{number:02}.mp4").write_bytes(data)
    return aiofeed.Clips(aiofeed.Files(sorted(folder.glob("*.mp4"))), 2, per_video=1, size=(8, 16))


def _clips_with_sound(folder: Path, _: Any) -> aiofeed.Clips:
    data = video(12, preset="ultrafast", sound=True)
    for number in range(N):
        (folder / "ab"[number * 2 // N]).mkdir(exist_ok=True)
        (folder / "ab"[number * 2 // N] / f"{number:02}.mp4").write_bytes(data)
    return aiofeed.Clips(folder, 2, per_video=2, size=(8, 16), fps=5.0, audio=aiofeed.DecodeAudio(1000))


def _clips_and_classes(clips: Any) -> list[Any]:
    return [(clips.decoder(path), label) for path, label in zip(clips.source.paths, clips.targets, strict=True)]


def _clip_samples(clips: Any) -> list[Any]:
    paths = sorted(Path(clips.key(0)).parent.glob("*.mp4"))
    return [clips.decoder(path.read_bytes()) for path in paths]


def _as_dicts(_: Any) -> list[dict[str, Any]]:
    return [{"x": row} for row in X]


def _token_pairs(_: Any) -> list[tuple[Any, Any]]:
    tokens = np.append(X, N * WIDTH)
    return [(tokens[at : at + WIDTH], tokens[at + 1 : at + 1 + WIDTH]) for at in range(0, N * WIDTH, WIDTH)]


S = EverySource
EVERY_SOURCE: dict[str, EverySource] = {
    "Files": S(_files, "encoded samples", row_of),
    "Files at URLs": S(_objects, "encoded samples", row_of, needs=("obstore",)),
    "ImageFolder": S(
        lambda folder, _: aiofeed.ImageFolder(_pictures(folder)),
        "encoded samples, samples with targets",
        pixels_of,
        lambda _: [(row, number * 2 // N) for number, row in enumerate(X)],
    ),
    "FolderPairs": S(
        lambda folder, _: aiofeed.FolderPairs(_pictures(folder / "images"), _pictures(folder / "masks", X + 7)),
        "encoded samples, a decoder of tuples",
        pair_of,
        lambda _: [(row, row + 7) for row in X],
    ),
    "Manifest": S(
        _manifest,
        "encoded samples, samples with targets",
        row_of,
        lambda _: [(row, number) for number, row in enumerate(X)],
    ),
    "TarShards": S(
        lambda folder, _: aiofeed.TarShards(_shards(folder, write_tar, "tar"), "bin"), "encoded samples, shards", row_of
    ),
    "ZipShards": S(
        lambda folder, _: aiofeed.ZipShards(_shards(folder, write_zip, "zip"), "bin"), "encoded samples, shards", row_of
    ),
    "MDSShards": S(_mds, "encoded samples, shards", row_of),
    "TFRecordShards": S(_records, "encoded samples, shards", row_of),
    "ParquetRows": S(
        lambda folder, _: aiofeed.ParquetRows(_parquet(folder)),
        "encoded samples, shards",
        column_of,
        needs=("pyarrow",),
    ),
    "an object of three methods": S(lambda *_: Bytes(), "encoded samples", row_of),
    "an object of decoded samples": S(lambda *_: OwnRows(), "an object of decoded samples, decoded samples"),
    "a part of Files": S(lambda *given: _files(*given)[::-1], "encoded samples", row_of, lambda _: X[::-1]),
    "Dataset": S(lambda *_: Rows(), "Dataset"),
    "list": S(lambda *_: list(map(torch.from_numpy, X)), "Dataset"),
    "FromDataset": S(lambda *_: aiofeed.FromDataset(Rows(), threads=2), "Dataset"),
    "a part of FromDataset": S(lambda *_: aiofeed.FromDataset(Rows())[::-1], "Dataset", model=lambda _: X[::-1]),
    "TensorDataset": S(
        lambda *_: torch.utils.data.TensorDataset(torch.from_numpy(X)),
        "Dataset, a Dataset of tuples",
        model=lambda _: [(row,) for row in X],
    ),
    "Tensors": S(lambda *_: aiofeed.Tensors(torch.from_numpy(X)), "Tensors", model=lambda _: [(row,) for row in X]),
    "Table of Arrow": S(lambda *_: aiofeed.Table(_arrow()), "rows, Table", None, _as_dicts, ("pyarrow",)),
    "Table of a file": S(_arrow_file, "rows, Table", None, _as_dicts, ("pyarrow",)),
    "Table of Parquet": S(
        lambda folder, _: aiofeed.Table(_parquet(folder)), "rows, Table, shards", None, _as_dicts, ("pyarrow",)
    ),
    "Table of CSV, decoded": S(
        lambda folder, _: _blocks(folder, "csv"), "a Table with decode=, shards", cells_of, needs=("pyarrow",)
    ),
    "Table of JSON Lines": S(
        lambda folder, _: _blocks(folder, "jsonl"), "rows, Table, shards", None, _as_dicts, ("pyarrow",)
    ),
    "Table of NumPy": S(_structured, "rows, Table", None, _as_dicts, ("pyarrow",)),
    "Table of datasets": S(lambda *_: aiofeed.Table(_hf_dataset()), "rows, Table", None, _as_dicts, ("datasets",)),
    "Table, decoded": S(
        lambda folder, _: aiofeed.Table(_arrow()), "a Table with decode=", column_of, needs=("pyarrow",)
    ),
    "a part of Table": S(lambda *_: aiofeed.Table(_arrow())[:], "rows, Table", None, _as_dicts, ("pyarrow",)),
    "Tokens": S(lambda folder, _: aiofeed.Tokens(write_raw(folder / "x.bin", X), WIDTH), "rows, Tokens, shards"),
    "Tokens with targets": S(
        lambda folder, _: aiofeed.Tokens(write_raw(folder / "x.bin", range(N * WIDTH + 1)), WIDTH, targets=True),
        "rows, Tokens, shards, Tokens with targets",
        model=_token_pairs,
    ),
    "Tokens of a column": S(
        lambda folder, _: aiofeed.Tokens(_parquet(folder), WIDTH, column="x"),
        "Tokens, Tokens at URLs, shards",
        needs=("pyarrow",),
    ),
    "a part of Tokens": S(
        lambda folder, _: aiofeed.Tokens(write_raw(folder / "x.bin", X), WIDTH)[:],
        "rows, Tokens, shards, a part of Tokens",
    ),
    "Documents": S(lambda folder, _: aiofeed.Documents(write_megatron(folder / "x.bin", X)), "rows, Documents, shards"),
    "Documents of a column": S(
        lambda folder, _: aiofeed.Documents(_parquet(folder), column="x"),
        "rows, Documents, shards",
        needs=("pyarrow",),
    ),
    "a part of Documents": S(
        lambda folder, _: aiofeed.Documents(write_megatron(folder / "x.bin", X))[::-1],
        "rows, Documents",
        model=lambda _: X[::-1],
    ),
    "Arrays of HDF5": S(_hdf5, "rows, Arrays, shards", None, _as_dicts, ("h5py",)),
    "Arrays of cells": S(_cells, "rows, Arrays, shards", None, _as_dicts, ("h5py",)),
    "Arrays of NetCDF": S(_netcdf, "rows, Arrays, shards", None, _as_dicts, ("h5netcdf",)),
    "Arrays of Zarr": S(_zarr, "rows, Arrays, shards", None, _as_dicts, ("zarr",)),
    "Arrays of images": S(_images, "rows, Arrays, shards", None, _as_dicts, ("zarr",)),
    "Clips": S(_clips, "Clips, decoded samples", None, _clip_samples, ("av",)),
    "Clips of a folder, with sound": S(
        _clips_with_sound,
        "Clips, decoded samples, decoded dicts, samples with targets",
        None,
        _clips_and_classes,
        ("av",),
    ),
    "Episodes": S(
        lambda *_: aiofeed.Episodes(LEROBOT, {"action": [0.0]}, episodes=[0], features=["action", "observation.state"]),
        "rows, Episodes, shards",
        None,
        lambda source: [source[index] for index in range(len(source))],
        ("av", "pyarrow"),
    ),
    "Episodes with a camera": S(
        lambda *_: aiofeed.Episodes(LEROBOT, episodes=[0], features=["observation.images.top", "index"]),
        "Episodes with a camera, decoded samples, shards",
        None,
        lambda source: [source[index] for index in range(len(source))],
        ("av", "pyarrow"),
    ),
    "Mixture of Datasets": S(
        lambda *_: aiofeed.Mixture({"a": list(map(torch.from_numpy, X[:6])), "b": list(map(torch.from_numpy, X[6:]))}),
        "Mixture, Dataset",
        order=ALTERNATING,
    ),
    "Mixture of Files": S(
        lambda *given: aiofeed.Mixture({"a": _files(*given)[:6], "b": _files(*given)[6:]}),
        "Mixture, encoded samples",
        row_of,
        order=ALTERNATING,
    ),
    "Mixture of Tokens and a Dataset": S(
        lambda folder, _: aiofeed.Mixture(
            {"a": aiofeed.Tokens(write_raw(folder / "x.bin", X[:6]), WIDTH), "b": list(map(torch.from_numpy, X[6:]))}
        ),
        "Mixture of any sources, decoded samples",
        order=ALTERNATING,
    ),
    "Mixture of Parquet and Files": S(
        lambda folder, _: aiofeed.Mixture(
            {"a": aiofeed.Table(_parquet(folder))[:6], "b": _files(folder)[6:]},
            decode={"b": dict_of},
        ),
        "Mixture of any sources, decoded samples, decoded dicts",
        None,
        _as_dicts,
        ("pyarrow",),
        order=ALTERNATING,
    ),
    "Mixture of Arrays": S(
        lambda *given: aiofeed.Mixture(dict(zip("ab", halves(_hdf5(*given)), strict=True))),
        "Mixture of rows, shards",
        None,
        _as_dicts,
        ("h5py",),
        order=ALTERNATING,
    ),
    "a part of a Mixture": S(
        lambda *given: aiofeed.Mixture({"a": _files(*given)[::2], "b": _files(*given)[1::2]}, [1, 1])[:],
        "encoded samples",
        row_of,
    ),
    "Mixture with weights": S(
        lambda *_: aiofeed.Mixture({"a": list(X[:6]), "b": list(X[6:])}, [1, 1]),
        "a Mixture with weights, Dataset",
        order=ALTERNATING,
    ),
    "Stream": S(lambda *_: aiofeed.Stream(RowStream()), "a stream"),
    "IterableDataset": S(lambda *_: RowStream(), "a stream"),
    "Table of a stream": S(
        lambda *_: aiofeed.Table(_hf_dataset().to_iterable_dataset()), "a stream", None, _as_dicts, ("datasets",)
    ),
}
"""A new source is one line."""

# Few machines have these packages, and a test of all pairs is skipped without one that a source needs.
if importlib.util.find_spec("array_record"):
    EVERY_SOURCE["ArrayRecordShards"] = S(_array_records, "encoded samples, shards", row_of, needs=("array_record",))
if importlib.util.find_spec("litdata"):
    EVERY_SOURCE["LitDataShards"] = S(_litdata, "samples of LitData, shards", None, _as_dicts, ("litdata",))
