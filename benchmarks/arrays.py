"""How fast are samples of chunked arrays, beside a ``DataLoader`` around h5py or zarr, xbatcher and annbatch?

Windows of 4 steps of a weather of 4,000 steps of 64 x 64 float32, smooth noise that compresses to 0.6, in chunks of 16
steps, in batches of 32 in random order: in HDF5 with gzip and shuffle, and in Zarr with blosc (zstd). ``DataLoader``
has two workers, each of which opens the array. With ``shuffle=True`` the look-ahead has the bytes of a quarter of the
array, so that chunks are decoded again when they come back; ``"window"`` decodes each once. The same Zarr in a store
that answers after 20 ms, where ``DataLoader`` gets 256 samples. Rows of a CSR matrix, 40,000 cells of 300 genes out of
4,000, in annbatch's own layout and beside its loader, as sparse batches of 1,024 with their labels; on the local disk
with zarrs.

Windows of data that decompress quickly, sums of steps, of the same shape. Rows of 50 floats in chunks of 1,000, batch
4,096, beside a block shuffle by NumPy; tiles of 32 x 32 x 32 bytes at random places of data without chunks, beside
h5py in the same thread; windows of every second row out of 1,000, beside those of all rows.

annbatch and xbatcher take part if AIOFEED_ARRAYS_PYTHON is the path of an interpreter with annbatch[zarrs,torch],
xbatcher, obstore and psutil. Memory is the peak above the imports, in look-aheads with the samples of a window; and
beyond that of the first batch, in chunks of a window.

Targets: HDF5 1.3 times ``DataLoader`` shuffled and 6 times with windows, sums of steps 1.3 and 5 times, Zarr 2 and 6
times; 0.67 of the rows of NumPy, as many tiles as h5py, and every second step 0.83 times as fast as all; in the store
30 times, and 0.9 of the local array and of a store that answers at once; sparse rows as fast as from annbatch, and
twice in the store; memory of two look-aheads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import Counted, epochs, loaded
from benchmarks.data import generate
from benchmarks.figures import Figure, at_most
from benchmarks.harness import PROJECT, Contender, Measure, Settings, interleave, measure_memory
from benchmarks.objects import DELAY_S, new_store, options_of, server

if TYPE_CHECKING:
    import aiofeed

TITLE = "Arrays: windows of 4 x 64 x 64 float32, batch 32; small rows, tiles and steps; sparse rows, batch 1,024"

PEERS = "AIOFEED_ARRAYS_PYTHON"
"""The environment variable with the interpreter that has annbatch and xbatcher."""

STEPS, SIDE, CHUNK, WINDOW, BATCH = 4_000, 64, 16, 4, 32
CELLS, GENES, PER_CELL, ROWS = 40_000, 4_000, 300, 1_024
STORED_SAMPLES = 256
WINDOW_SAMPLES = 16 * 64
"""The samples that ``shuffle="window"`` mixes: 16 shards of 64, which is 4 chunks."""
LOADER, XBATCHER, ANNBATCH, STORE = "DataLoader, 2 workers", "xbatcher, 2 workers", "annbatch", "20 ms"
ORDERS = {"shuffled": (True, 1), "window": ("window", 4)}
"""The argument ``shuffle=``, and the epochs of a round."""
IMPORTS = ("torch", "uvloop", "h5py", "imagecodecs", "zarr", "aiofeed:Feeder", "aiofeed:Arrays")


def run(settings: Settings) -> list[Figure]:
    folder = weather(settings)
    figures = compared(settings, "HDF5", f"{folder / 'weather.h5'}::t2m", (1.3, 6))
    figures += compared(settings, "Zarr", str(folder / "weather.zarr/t2m"), (2, 6))
    figures += compared(settings, "sums of steps", f"{folder / 'weather.h5'}::steps", (1.3, 5))
    figures += [*small_parts(settings, folder), *stored(settings, folder), *memory(settings, folder)]
    if PEERS in os.environ:
        return figures + cells(settings)
    print(f"Without {PEERS} there are no figures beside xbatcher and annbatch.")
    return figures


def weather(settings: Settings) -> Path:
    steps = settings.size(STEPS, 64)
    return generate(settings.data / f"arrays-2-{steps}", lambda made: write_weather(made, steps))


def compared(settings: Settings, name: str, array: str, targets: tuple[float, float]) -> list[Figure]:
    """Windows of one file in both orders, beside ``DataLoader`` and, of Zarr, xbatcher."""
    lookahead = settings.size(STEPS, 64) * SIDE * SIDE
    contenders = [
        Contender("shuffled", windows, {"array": array, "order": "shuffled", "lookahead": lookahead}),
        Contender("window", windows, {"array": array, "order": "window"}),
        Contender(LOADER, data_loader, {"array": array}),
    ]
    if name == "Zarr" and PEERS in os.environ:
        contenders.append(Contender(XBATCHER, xbatcher, {"array": array}, python=os.environ[PEERS]))
    race = interleave(contenders, settings)
    figures = []
    for order, target in zip(ORDERS, targets, strict=True):
        case = f"{name}, {order}"
        figures += [race.speed(order, other, target, case) for other in (LOADER, XBATCHER) if other in race]
        figures.append(race.cpu(order, LOADER, None, case))
    return figures + race.rates("samples", name)


def small_parts(settings: Settings, folder: Path) -> list[Figure]:
    """Rows, tiles, and windows with a step, each beside another way to the same values."""
    file, count = str(folder / "small.h5"), settings.size(512, 16)
    figures = []
    for case, contenders, target in (
        ("rows of 50 floats", (small_rows, numpy_rows, {"file": file}, {}), 0.67),
        ("tiles without chunks", (tiles, h5py_tiles, {"file": file, "count": count}, {}), 1),
        ("a step of 2", (stepped, stepped, {"file": file, "step": 2}, {"step": 1}), 0.83),
    ):
        ours, other, options, changed = contenders
        race = interleave([Contender("ours", ours, options), Contender("other", other, options | changed)], settings)
        figures += [race.speed("ours", "other", target, case), *race.rates("samples", case)]
    return figures


def stored(settings: Settings, folder: Path) -> list[Figure]:
    """Zarr from a store, beside ``DataLoader``, the local array, and a store that answers at once."""
    place, window = "weather.zarr/t2m", {"order": "window"}
    at_once = ("--folder", str(folder))
    with server(*at_once, "--delay", str(DELAY_S)) as port, server(*at_once) as other_port:
        contenders = [
            Contender(STORE, windows, {"array": place, "port": port, **window}),
            Contender("0 ms", windows, {"array": place, "port": other_port, **window}),
            Contender("local", windows, {"array": str(folder / place), **window}),
            Contender(LOADER, data_loader, {"array": place, "port": port, "samples": settings.size(STORED_SAMPLES, 4)}),
        ]
        race = interleave(contenders, settings)
    figures = [race.speed(STORE, other, least, STORE) for other, least in ((LOADER, 30), ("local", 0.9), ("0 ms", 0.9))]
    return [*figures, *race.rates("samples", STORE)]


def memory(settings: Settings, folder: Path) -> list[Figure]:
    """The peak above the imports in look-aheads of a window, and beyond that of the first batch in its chunks."""
    chunks = WINDOW_SAMPLES * SIDE * SIDE * 4
    lookahead = chunks * WINDOW
    figures = []
    for name, array in (("HDF5", "weather.h5::t2m"), ("Zarr", "weather.zarr/t2m")):
        contender = Contender(name, first_and_rest, {"array": str(folder / array), "lookahead": lookahead}, IMPORTS)
        found = [measure_memory(contender, settings, (1, 1))[0] for _ in range(min(2, settings.rounds))]
        peaks = tuple(most / lookahead for _, most in found)
        beyond = tuple((most - first) / chunks for first, most in found)
        figures.append(Figure(f"memory / look-ahead, {name}", peaks, target=at_most(2)))
        figures.append(Figure(f"memory beyond the first batch / chunks of the window, {name}", beyond))
    return figures


def cells(settings: Settings) -> list[Figure]:
    """Rows of annbatch's layout, beside annbatch."""
    count, python = settings.size(CELLS, 2_000), os.environ[PEERS]

    def write(folder: Path) -> None:
        subprocess.run([python, "-m", "benchmarks.arrays", str(folder), str(count)], cwd=PROJECT, check=True)

    folder = generate(settings.data / f"cells-{count}", write)
    figures = []
    with server("--folder", str(folder), "--delay", str(DELAY_S)) as port:
        for name, place, least in (
            ("cells", {"folder": str(folder)}, 1),
            (f"cells, {STORE}", {"folder": "s3://bucket", "port": port}, 2),
        ):
            contenders = [Contender("rows", rows, place), Contender(ANNBATCH, annbatch, place, python=python)]
            race = interleave(contenders, settings)
            figures += [
                race.speed("rows", ANNBATCH, least, name),
                race.cpu("rows", ANNBATCH, None, name),
                *race.rates("rows", name),
            ]
    return figures


# --- contenders -------------------------------------------------------------------------------------------------------


def samples_in(batch: Any) -> int:
    return len(batch["x"])


def feeder_of(array: str, shuffle: Any, lookahead: int | None, port: int | None = None) -> aiofeed.Feeder[Any]:
    import aiofeed

    place, options = (array, None) if port is None else (f"s3://bucket/{array}", options_of(port))
    source = aiofeed.Arrays({"x": place}, window=range(WINDOW), options=options)
    limits = aiofeed.Limits(lookahead_bytes=lookahead)
    return aiofeed.Feeder(source, batch_size=BATCH, shuffle=shuffle, limits=limits)


def several_epochs(feeder: aiofeed.Feeder[Any], count: int) -> Callable[[], Iterator[Any]]:
    """A function whose every call iterates the feeder's next ``count`` epochs, and prefetches nothing beyond them."""
    done = 0

    def batches() -> Iterator[Any]:
        nonlocal done
        done += count
        for _ in feeder.epochs(done):
            yield from feeder

    return batches


@contextmanager
def measured(feeder: aiofeed.Feeder[Any], count: int, samples_in: Callable[[Any], int]) -> Iterator[Measure]:
    with feeder, epochs(several_epochs(feeder, count), samples_in) as measure:
        yield measure


def windows(
    array: str, order: str, lookahead: int | None = None, port: int | None = None
) -> AbstractContextManager[Measure]:
    shuffle, count = ORDERS[order]
    return measured(feeder_of(array, shuffle, lookahead, port), count, samples_in)


@contextmanager
def first_and_rest(array: str, lookahead: int) -> Iterator[Measure]:
    """Measures the first batch, then the rest of some epochs."""
    with feeder_of(array, "window", lookahead) as feeder:
        batches, counts = several_epochs(feeder, 4)(), iter([1, None])
        yield lambda: {"items": sum(map(samples_in, islice(batches, next(counts))))}


def small_rows(file: str) -> AbstractContextManager[Measure]:
    import aiofeed

    source = aiofeed.Arrays({"x": f"{file}::rows"})
    return measured(aiofeed.Feeder(source, batch_size=4_096, shuffle="window"), 4, samples_in)


def numpy_rows(file: str) -> AbstractContextManager[Measure]:
    """16 chunks at a time in random order, their rows permuted."""
    import h5py
    import numpy as np
    import torch

    numbers, data = np.random.default_rng(0), h5py.File(file)["rows"]

    def batches() -> Iterator[Any]:
        for _ in range(4):
            starts = numbers.permutation(np.arange(0, len(data), 1_000)).tolist()
            for at in range(0, len(starts), 16):
                block = np.concatenate([data[start : start + 1_000] for start in starts[at : at + 16]])
                permuted = numbers.permutation(len(block))
                yield from (torch.from_numpy(block[permuted[at : at + 4_096]]) for at in range(0, len(block), 4_096))

    return epochs(batches, len)


def tiles(file: str, count: int) -> AbstractContextManager[Measure]:
    import aiofeed

    tile = {"window": range(32), "tile": {1: 32, 2: 32}, "stride": "random"}
    source = aiofeed.Arrays({"x": f"{file}::volume"}, **tile)
    some = source[[at % len(source) for at in range(count)]]
    return measured(aiofeed.Feeder(some, batch_size=8, shuffle=True), 4, samples_in)


def h5py_tiles(file: str, count: int) -> AbstractContextManager[Measure]:
    import h5py
    import numpy as np
    import torch

    numbers, volume = np.random.default_rng(0), h5py.File(file)["volume"]

    def batches() -> Iterator[Any]:
        for z, y, x in numbers.integers(0, np.array(volume.shape) - 32, (4 * count, 3)).tolist():
            yield torch.from_numpy(volume[z : z + 32, y : y + 32, x : x + 32])[None]

    return epochs(batches, len)


def stepped(file: str, step: int) -> AbstractContextManager[Measure]:
    import aiofeed

    source = aiofeed.Arrays({"x": f"{file}::rows"}, window=range(0, 1_000, step))[::100]
    return measured(aiofeed.Feeder(source, batch_size=32, shuffle=True), 4, samples_in)


class Windows(Counted):
    """A ``Dataset`` that opens the array where it reads it."""

    def __init__(self, array: str, port: int | None) -> None:
        super().__init__(opened(array, port).shape[0] - WINDOW + 1)
        self._place = array, port
        self._array: Any = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if self._array is None:
            self._array = opened(*self._place)
        return {"x": torch.from_numpy(self._array[index : index + WINDOW])}


def opened(array: str, port: int | None) -> Any:
    if "::" in array:
        import h5py

        path, name = array.split("::")
        return h5py.File(path)[name]
    import zarr
    from zarr.storage import ObjectStore

    if port is None:
        return zarr.open_array(array, mode="r")
    return zarr.open_array(ObjectStore(new_store(options_of(port)), read_only=True), path=array, mode="r")


def data_loader(array: str, port: int | None = None, samples: int | None = None) -> AbstractContextManager[Measure]:
    return workers(Windows(array, port), samples_in, samples)


def workers(dataset: Any, count: Callable[[Any], int], samples: int | None = None) -> AbstractContextManager[Measure]:
    """Measures a ``DataLoader`` with two workers, which are spawned: zarr and obstore have threads."""
    from torch.utils.data import RandomSampler

    sampler = RandomSampler(dataset, num_samples=samples)
    return loaded(dataset, BATCH, 2, count, sampler=sampler, multiprocessing_context="spawn")


def xbatcher(array: str) -> AbstractContextManager[Measure]:
    import xarray
    from xbatcher import BatchGenerator  # type: ignore[import-not-found, unused-ignore]
    from xbatcher.loaders.torch import MapDataset  # type: ignore[import-not-found, unused-ignore]

    path, _, name = array.rpartition("/")
    weather = xarray.open_zarr(path, chunks=None, consolidated=False)[name]
    inputs = {"time": WINDOW, "lat": SIDE, "lon": SIDE}
    return workers(MapDataset(BatchGenerator(weather, inputs, {"time": WINDOW - 1})), len)


def rows(folder: str, port: int | None = None) -> AbstractContextManager[Measure]:
    import aiofeed

    data = f"{folder}/cells.zarr/dataset_0"
    options = None if port is None else options_of(port)
    source = aiofeed.Arrays({"x": f"{data}/X", "y": f"{data}/obs/cell_type"}, sparse="csr", options=options)
    return measured(aiofeed.Feeder(source, batch_size=ROWS, shuffle="window"), 4, lambda batch: len(batch["y"]))


def annbatch(folder: str, port: int | None = None) -> AbstractContextManager[Measure]:
    """Its loader with the arguments of its documentation, and zarrs, which it advises for the local disk only.

    Zarr's default of 10 reads at a time halves its speed in the store.
    """
    import torch
    import zarr
    from annbatch import DatasetCollection, Loader  # type: ignore[import-not-found, unused-ignore]
    from zarr.storage import ObjectStore

    if port is None:
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        group = zarr.open_group(f"{folder}/cells.zarr", mode="r")
    else:
        zarr.config.set({"async.concurrency": 64})
        store = ObjectStore(new_store(options_of(port)), read_only=True)
        group = zarr.open_group(store, path="cells.zarr", mode="r")
    loader = Loader(batch_size=ROWS, chunk_size=32, preload_nchunks=256, shuffle=True, to="torch")
    loader.use_collection(DatasetCollection(group, mode="r"), load_adata=only_cell_types)

    def batches() -> Iterator[Any]:
        for batch in chain.from_iterable(loader for _ in range(4)):
            yield batch["X"], torch.tensor(batch["obs"]["cell_type"].cat.codes.to_numpy())

    return epochs(batches, lambda batch: len(batch[1]))


def only_cell_types(group: Any) -> Any:
    import anndata

    labels = anndata.io.read_elem(group["obs"])[["cell_type"]]
    return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]), obs=labels)


# --- data -------------------------------------------------------------------------------------------------------------


def write_weather(folder: Path, steps: int) -> None:
    """Write smooth noise, which changes by a tenth of its deviation from step to step, to HDF5 and Zarr."""
    import h5py
    import numpy as np
    import zarr.codecs

    numbers, axes = np.random.default_rng(0), ("time", "lat", "lon")
    waves = [np.fft.fftfreq(steps) * steps / 40, np.fft.fftfreq(SIDE) * SIDE, np.fft.rfftfreq(SIDE) * SIDE]
    squares = sum(np.square(part) for part in np.meshgrid(*waves, indexing="ij"))
    noise = numbers.standard_normal((2, *squares.shape), np.float32)
    field = np.fft.irfftn((noise[0] + 1j * noise[1]) / (1 + squares) ** 1.25, (steps, SIDE, SIDE), (0, 1, 2))
    data, chunks = (280 + 10 * field / field.std()).astype(np.float32), (CHUNK, SIDE, SIDE)
    with h5py.File(folder / "weather.h5", "w") as file:
        file.create_dataset("t2m", data=data, chunks=chunks, compression="gzip", shuffle=True)
        sums = numbers.integers(-1, 2, steps).cumsum().astype(np.float32)[:, None, None] + np.arange(SIDE, dtype="f4")
        whole = np.repeat(sums[:, :, :], SIDE, 1)
        file.create_dataset("steps", data=whole, chunks=chunks, compression="gzip", shuffle=True)
    with h5py.File(folder / "small.h5", "w") as file:
        rows = numbers.random((10 * steps, 50), np.float32)
        file.create_dataset("rows", data=rows, chunks=(min(1_000, len(rows)), 50), compression="lzf")
        side = min(steps, 1_024)
        file.create_dataset("volume", data=numbers.integers(0, 255, (min(steps, 100), side, side), np.uint8))
    blosc = zarr.codecs.BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
    group = zarr.open_group(folder / "weather.zarr", mode="w")
    group.create_array("t2m", data=data, chunks=chunks, compressors=blosc, dimension_names=axes)


def write_cells(folder: Path, count: int) -> None:
    """Write cells as annbatch does, in its interpreter."""
    import anndata
    import numpy as np
    import pandas
    import scipy.sparse
    from annbatch import DatasetCollection

    numbers = np.random.default_rng(0)
    starts = np.concatenate([[0], numbers.poisson(PER_CELL, count).cumsum()])
    genes, counts = numbers.integers(0, GENES, starts[-1]), numbers.geometric(0.5, starts[-1]).astype(np.float32)
    matrix = scipy.sparse.csr_matrix((counts, genes, starts), (count, GENES))
    matrix.sum_duplicates()
    types = pandas.Categorical.from_codes(numbers.integers(0, 12, count), [f"type {number}" for number in range(12)])
    cells = anndata.AnnData(matrix, pandas.DataFrame({"cell_type": types}, index=list(map(str, range(count)))))
    cells.write_h5ad(folder / "cells.h5ad")
    DatasetCollection(folder / "cells.zarr").add_adatas([folder / "cells.h5ad"])


if __name__ == "__main__":
    write_cells(Path(sys.argv[1]), int(sys.argv[2]))
