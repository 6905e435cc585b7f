"""Torch's `DataLoader` with aiofeed's iterators, as under `aiofeed run` and in notebooks: same class, same batches."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import aiofeed
from aiofeed.loader.run import hook, loaders
from tests.support.loader_parts import Plain, same, seed_all

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROWS = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


class Shell:
    """What IPython gives to an extension."""

    def __init__(self) -> None:
        self.magics: dict[str, Callable[[str], None]] = {}

    def register_magic_function(self, function: Callable[[str], None], kind: str, name: str) -> None:
        self.magics[name] = function


@pytest.fixture
def shell() -> Iterator[Shell]:
    """Torch's `DataLoader` is changed during the test."""
    shell = Shell()
    aiofeed.load_ipython_extension(shell)  # type: ignore[attr-defined]
    yield shell
    aiofeed.unload_ipython_extension(shell)  # type: ignore[attr-defined]
    loaders._records.clear()
    hook.options.clear()


def lines(shell: Shell, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of `%aiofeed`."""
    shell.magics["aiofeed"]("")
    return capsys.readouterr().err.strip().splitlines()


class Augmented(TensorDataset):
    """Adds numbers of all three generators to a row."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index] + torch.rand(()), random.random(), np.random.rand()


class Stream(IterableDataset[int]):
    """Each worker yields its own part."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(0 if worker is None else worker.id, 13, 1 if worker is None else worker.num_workers)


class Doubling(DataLoader[Any]):
    """A subclass that was made before torch's class is changed. Overrides `__init__` and `__iter__`."""

    def __init__(self, *arguments: Any, factor: int = 2, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.factor = factor

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [self.factor * part for part in batch]


class OwnIterator(DataLoader[Any]):
    """Makes torch's iterator itself."""

    def _get_iterator(self) -> Any:
        return _MultiProcessingDataLoaderIter(self)


class Forever:
    """A sampler that reads ahead of its own batch sampler, as timm's loader has."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """Keeps one iterator for all epochs, as timm's loader of that name."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Forever(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


def made_again(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader made from the public attributes of another one, as Lightning does for a distributed sampler."""
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (type(loader), DataLoader))
    parameters = {*ours, *theirs} - {"self"}
    attributes = {name: value for name, value in vars(loader).items() if name in parameters}
    attributes.update(batch_sampler=None, shuffle=False, sampler=torch.utils.data.SequentialSampler(loader.dataset))  # type: ignore[arg-type]
    attributes["multiprocessing_context"] = None
    return type(loader)(**attributes)


def seeded(worker: int) -> None:
    torch.manual_seed(100 + worker)


def made_afterwards() -> Any:
    return type("Local", (torch.utils.data.DataLoader,), {"__len__": lambda _: 3})(ROWS, 8)


def from_star() -> type[DataLoader[Any]]:
    names: dict[str, Any] = {}
    exec("from torch.utils.data import *", names)
    return names["DataLoader"]


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IDIOMS: dict[str, Callable[[], Any]] = {
    "name": lambda: DataLoader(ROWS, 3, shuffle=True),
    "attribute": lambda: torch.utils.data.DataLoader(ROWS, 3, shuffle=True, drop_last=True),
    "module": lambda: torch.utils.data.dataloader.DataLoader(ROWS, 7, num_workers=2),
    "star": lambda: from_star()(ROWS, 4, shuffle=True),
    "single samples": lambda: DataLoader(ROWS, batch_size=None),
    "augmentation": lambda: DataLoader(Augmented(torch.ones(9, 2)), 2, shuffle=True),
    "augmentation in workers": lambda: DataLoader(Augmented(torch.ones(9, 2)), 2, shuffle=True, num_workers=2),
    "worker_init_fn": lambda: DataLoader(Augmented(torch.ones(9, 2)), 2, num_workers=2, worker_init_fn=seeded),
    "persistent workers": lambda: DataLoader(
        Augmented(torch.ones(9, 2)), 2, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4
    ),
    "collate_fn": lambda: DataLoader(
        ROWS, 3, collate_fn=lambda rows: {"x": torch.stack([x for x, _ in rows]), "n": len(rows)}, num_workers=1
    ),
    "generator": lambda: DataLoader(ROWS, 3, shuffle=True, generator=generator()),
    "sampler with a generator": lambda: DataLoader(
        ROWS, sampler=RandomSampler(ROWS, generator=generator()), num_workers=1
    ),
    "weighted sampler": lambda: DataLoader(ROWS, 3, sampler=WeightedRandomSampler([1.0, 2.0] * 10, 15)),
    "batch sampler": lambda: DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 6, drop_last=False)),
    "iterable dataset": lambda: DataLoader(Stream(), 2),
    "iterable dataset in workers": lambda: DataLoader(Stream(), 2, num_workers=2),
    "subclass": lambda: Doubling(ROWS, 4, shuffle=True, factor=3),
    "subclass with workers": lambda: Doubling(ROWS, 4, num_workers=1),
    "subclass made afterwards": made_afterwards,
    "one iterator for all epochs": lambda: MultiEpochs(ROWS, 4, shuffle=True, num_workers=1),
    "own iterator": lambda: OwnIterator(ROWS, 4, shuffle=True, num_workers=1),
    "made again": lambda: made_again(Doubling(ROWS, 4, shuffle=True)),
    "copied": lambda: copy.deepcopy(DataLoader(ROWS, 4, shuffle=True)),
    "pickled": lambda: pickle.loads(pickle.dumps(Doubling(ROWS, 4, shuffle=True))),
}


def trained(idiom: str) -> list[Any]:
    """Two epochs, the first of which is left early, and the state of the generators after them."""
    seed_all(3)
    loader = IDIOMS[idiom]()
    batches = [batch for batch, _ in zip(loader, range(2), strict=False)] + list(loader) + [torch.rand(2)]
    batches = copy.deepcopy(batches)  # not in torch's shared memory, whose files stay open
    if idiom == "one iterator for all epochs":
        loader.iterator._shutdown_workers()
    return [*batches, random.random(), np.random.rand(), [str(cls) for cls in type(loader).__mro__]]


@functools.cache
def trained_before(idiom: str) -> list[Any]:
    """What an idiom gives with torch's iterators."""
    return trained(idiom)


@pytest.fixture(params=IDIOMS)
def idiom(request: pytest.FixtureRequest) -> str:
    """An idiom that has run with torch's iterators."""
    trained_before(request.param)
    return str(request.param)


def test_idioms(idiom: str, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaders of each idiom keep their class, give the same batches bit for bit, and are listed with their line."""
    assert same(trained(idiom), trained_before(idiom))
    (line,) = lines(shell, capsys)
    assert line.startswith(("aiofeed: tests/loader/test_run.py:", "aiofeed: " + __file__))
    assert ("left alone: its class, or this system, needs _MultiProcessing" in line) == (idiom == "own iterator"), line


def test_one_line_for_the_loaders_of_a_line(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the classes and the number of workers, and counts batches of several loaders."""
    for _ in range(3):
        list(DataLoader(ROWS, 5))
    line_number = sys._getframe().f_lineno - 1
    (line,) = lines(shell, capsys)
    assert f"test_run.py:{line_number} DataLoader of TensorDataset, num_workers=0: 12 batches, waited 0." in line


@pytest.mark.parametrize("rank", ["", "node-0", "\u00b2"])
def test_a_rank_that_is_no_number(
    rank: str, shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the environment, of which torch's loaders read nothing: they work, and are listed."""
    monkeypatch.setenv("RANK", rank)
    assert len(list(DataLoader(ROWS, 5))) == 4
    assert len(lines(shell, capsys)) == 1


def test_loaders_from_before_the_extension(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """A loader that was made before is changed, too, and all are torch's again after the extension is unloaded."""
    aiofeed.unload_ipython_extension(shell)  # type: ignore[attr-defined]
    loader = DataLoader(ROWS, 5)
    theirs = type(iter(loader))
    aiofeed.load_ipython_extension(shell)  # type: ignore[attr-defined]
    aiofeed.load_ipython_extension(shell)  # type: ignore[attr-defined]
    assert type(iter(loader)) is loaders._CountedIterator
    assert len(lines(shell, capsys)) == 1
    aiofeed.unload_ipython_extension(shell)  # type: ignore[attr-defined]
    assert type(iter(loader)) is theirs


def test_a_copy_of_a_loader_in_use(shell: Shell) -> None:
    """Copies of a loader in mid-epoch, shallow ones too, have workers and a position of their own."""
    loader = DataLoader(Plain(6), 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in other] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5]]


def test_frameworks_see_the_signature_of_torch(shell: Shell) -> None:
    """`__init__` has torch's parameters, and a loader no state that a framework would save."""
    assert "pin_memory_device" in inspect.signature(DataLoader.__init__).parameters
    assert next(iter(inspect.signature(DataLoader).parameters)) == "dataset"
    assert not hasattr(DataLoader(ROWS), "state_dict")


class Longer(IterableDataset[int]):
    """Has more items than its length says."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        yield from range(5)


def warned(new_loader: Any) -> list[tuple[str, str, int]]:
    """The warnings of loaders: their first words, file and line; lines of torch's files are 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        longer = new_loader(Longer())
        len(longer)
        for _ in longer:
            pass
        list(new_loader(ROWS, 5, pin_memory=True, pin_memory_device="cpu"))
        list(new_loader(ROWS, 10, num_workers=(os.cpu_count() or 1) + 2))
    return [(str(each.message)[:30], each.filename, each.lineno * (each.filename == __file__)) for each in caught]


def test_warnings_name_the_file_that_they_name_without_aiofeed(shell: Shell) -> None:
    """The user's line, or torch's file where torch's own names it."""
    found, of_ours = warned(DataLoader), warned(aiofeed.DataLoader)
    aiofeed.unload_ipython_extension(shell)  # type: ignore[attr-defined]
    expected = warned(DataLoader)
    assert found == of_ours == expected
    assert len(expected) >= 5
    assert {__file__, torch.utils.data.dataloader.__file__} == {name for _, name, _ in expected}


def test_loaders_of_aiofeed_are_not_listed(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """An `aiofeed.DataLoader` of the script is left as it is."""
    assert len(list(aiofeed.DataLoader(ROWS, 5))) == 4
    assert lines(shell, capsys) == []


def test_threads(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """`--threads` replaces workers where the dataset has indices; other loaders keep them."""
    hook.options["threads"] = 2
    plain = DataLoader(Plain(6), 2, num_workers=2)
    assert [batch.tolist() for batch in plain] == [[0, 1], [2, 3], [4, 5]]
    assert not hasattr(iter(plain), "_workers")
    assert len(list(DataLoader(Stream(), 2, num_workers=1))) == 7
    assert len(list(DataLoader(Plain(6), 2, num_workers=1, worker_init_fn=seeded))) == 3
    assert len(lines(shell, capsys)) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_device(shell: Shell, workers: int) -> None:
    """`--device` copies the batches; `auto` makes no copies where there is no accelerator."""
    hook.options["device"] = "cpu"
    assert [batch.tolist() for batch in DataLoader(Plain(4), 2, num_workers=workers)] == [[0, 1], [2, 3]]
    hook.options["device"] = "auto"
    iterator: Any = iter(DataLoader(Plain(4), 2, num_workers=workers))
    assert next(iterator).device.type == (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    if not torch.accelerator.is_available():
        assert iterator._feed is None
