"""Every source with every option: the samples are those of its model, or one sentence refuses it at once."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import aiofeed
from aiofeed import Feeder
from aiofeed.testing.source_check import Way, check_source, resumed, ways_of
from tests.support.encoded import as_it_is
from tests.support.every_source import EVERY_SOURCE, EverySource, X, plain, row_in, samples_in
from tests.support.fault_server import start_obstore
from tests.support.refusals import MIXED, MIXED_UNKNOWN_BEFORE, REFUSED, UNKNOWN_BEFORE, sentences
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("arrow_started", "zarr_started", "one_thread")


@pytest.fixture(scope="module", autouse=True)
def storage_started() -> None:
    """Start obstore's threads, if it is installed: they keep their descriptors."""
    if importlib.util.find_spec("obstore"):
        start_obstore()


FORKS_NOT = {"obstore", "array_record"}
"""Packages that do not work in a fork of a process that has used them."""


class Made(NamedTuple):
    """A source, and the model of its samples."""

    case: EverySource
    source: Any
    samples: list[Any]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Made]:
    """`make(name)` makes a source."""
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "listings"))
    folders = itertools.count()

    def made(name: str) -> Made:
        case = EVERY_SOURCE[name]
        for module in case.needs:
            pytest.importorskip(module)
        folder = tmp_path / f"source-{next(folders)}"
        folder.mkdir()
        server = request.getfixturevalue("object_server") if "obstore" in case.needs else None
        source = case.make(folder, server)
        return Made(case, source, case.samples(source))

    return made


def four_at_a_time() -> aiofeed.TokenBudget:
    """A plan that measures decoded samples, whatever they are, and keeps their order."""
    return aiofeed.TokenBudget("decoded", 16, length=lambda sample: 4)


def more_ways(made: Made, folder: Path) -> dict[str, Way]:
    """The ways to read a source that need what is for tests only, or change the form of batches."""
    n, order = len(made.samples), made.case.order or range(len(made.samples))
    lengths, every, devices = [1 + number % 5 for number in range(n)], range(n), [SimulatedDevice() for _ in range(3)]
    return {
        "Buckets": Way({"batch_size": aiofeed.Buckets(lengths, boundaries=[3], batch_sizes=[4, 2])}, every),
        "TokenBudget": Way({"batch_size": aiofeed.TokenBudget(lengths, 12)}, every),
        "Balanced": Way({"batch_size": aiofeed.Balanced(lengths, 12, groups=2)}, every),
        "Pack": Way({"batch_size": aiofeed.Pack([4] * n, context=8, rows=2)}, every),
        'lengths="measure"': Way({"batch_size": aiofeed.TokenBudget("measure", 16)}, every),
        'lengths="decoded"': Way({"batch_size": four_at_a_time(), "collate_fn": list}, order, True),
        "a plan without lengths=": Way({"batch_size": aiofeed.Pack(context=8, rows=2)}, every),
        "collate_fn=": Way({"collate_fn": list}, order, True),
        "transform=": Way({"transform": as_it_is}, order, True),
        "decode=": Way({"decode": made.case.decode or as_it_is}, order, True),
        "no decode=": Way({"decode": None}, order, True),
        "drop_last=True": Way({"drop_last": True, "batch_size": 5}, order[: n // 5 * 5], True),
        'cache="device"': Way({"cache": "device", "device": devices[0]}, order, True),
        "DiskCache": Way({"cache": aiofeed.DiskCache(folder / "samples")}, order, True),
        "EncodedCache": Way({"cache": aiofeed.EncodedCache(folder / "encoded", 1 << 24)}, order, True),
        "device=": Way({"device": devices[0]}, order, True),
        "a list of devices": Way({"device": devices[1:]}, order, True),
        "static_batches=True": Way({"static_batches": True, "drop_last": True}, order[: n // 4 * 4], True),
        "limits=": Way({"limits": aiofeed.Limits(read_concurrency=1, decode_threads=1)}, order, True),
    }


def documents_in(batch: Mapping[str, Any]) -> list[Any]:
    """The documents of a batch of `Pack`."""
    bounds, numbers = batch["cu_seqlens"].tolist(), batch["document_ids"].flatten().tolist()
    names = [name for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "cu_seqlens"]
    columns = {name: batch[name].flatten() for name in names if name not in ("position_ids", "document_ids")}
    parts = [slice(*each) for each in itertools.pairwise(bounds) if numbers[each[0]] >= 0]
    documents = [{name: column[part] for name, column in columns.items()} for part in parts]
    return [document.get("tokens", document) for document in documents]


def reader_of(name: str) -> Callable[[Any], list[Any]]:
    """A function that returns the samples of a batch of a way to read."""
    match name:
        case "collate_fn=" | 'lengths="decoded"':
            return lambda batch: list(map(plain, batch))
        case "Pack" | "a plan without lengths=":
            return lambda batch: list(map(plain, documents_in(batch)))
        case "a list of devices":
            return lambda batch: [plain(sample) for part in batch for sample in samples_in(part)]
    return lambda batch: list(map(plain, samples_in(batch)))


def problem(made: Made, name: str, way: Way) -> str:
    """What is wrong with two epochs of a source that is read in a way; empty: nothing."""
    kinds = made.case.kinds
    at_once, late = [sentences(rows, kinds, [name])[:1] for rows in (REFUSED, UNKNOWN_BEFORE)]
    try:
        feeder: Feeder[Any] = Feeder(made.source, **{"decode": made.case.decode, "batch_size": 4} | {**way.options})
    except (TypeError, ValueError) as error:
        return "" if any(text in str(error) for text in at_once) else f"refused, not {at_once}: {error}"
    epochs, samples_of = [], reader_of(name)
    with feeder:
        try:
            epochs = [[sample for batch in feeder for sample in samples_of(batch)] for _ in range(2)]
        except aiofeed.FeedError as error:
            return "" if any(text in str(error) for text in late) else f"late: {type(error).__name__}: {error}"
    again = way._replace(in_order=way.in_order and "shuffle" not in way.options)
    if at_once or late or not (way.gives(epochs[0], made.samples) and again.gives(epochs[1], made.samples)):
        return f"gives {epochs}, not {at_once or late or made.samples}"
    return ""


@pytest.mark.parametrize("group", ["orders", "forms", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EVERY_SOURCE)
def test_every_source_with_every_option(
    make: Callable[[str], Made], name: str, group: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two epochs have the samples of the model, or the constructor says the sentence of the table."""
    made = make(name)
    order = made.case.order or range(len(made.samples))
    ways = {'engine="process"': Way({"engine": "process:1"}, order, True)}
    if group != "processes":
        ways = ways_of(len(made.samples), made.case.order) if group == "orders" else more_ways(made, tmp_path)
    elif FORKS_NOT.isdisjoint(made.case.needs):
        request.getfixturevalue("forked_workers")
    if "a Mixture with weights" in made.case.kinds:  # whose epochs stay as long, see test_mixture_tokens.py
        ways.pop("exclude=", None)
    if made.case.decode and "encoded samples" not in made.case.kinds:  # a table needs none
        ways.pop("no decode=", None)
    found = {name: problem(made, name, way) for name, way in ways.items()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork with several threads
@pytest.mark.parametrize("name", [name for name, case in EVERY_SOURCE.items() if FORKS_NOT.isdisjoint(case.needs)])
def test_every_source_is_read_in_a_fork(make: Callable[[str], Made], name: str) -> None:
    """The child of a process that reads a source reads all samples of it, too, and the parent goes on."""
    made = make(name)
    found = functools.partial(problem, made, "feeder", Way({}, made.case.order or range(len(made.samples)), True))
    assert found() == ""
    if (child := os.fork()) == 0:  # pragma: no cover - in the child
        with contextlib.suppress(BaseException):
            signal.alarm(30)
            os._exit(bool(found()))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert found() == ""


def failing(decode: Callable[[Any], Any], bad: Any, data: Any) -> Any:
    """Decode a sample; fail for one that is as in the model."""
    sample = decode(data)
    if plain(sample) == bad:
        raise ValueError("it is bad")
    return sample


@pytest.mark.parametrize("name", [name for name, case in EVERY_SOURCE.items() if case.decode is not None])
def test_every_source_with_samples_that_fail(make: Callable[[str], Made], name: str) -> None:
    """``raise`` ends the epoch with the sample's key, ``skip`` leaves the sample out, ``replace`` has another one."""
    case, source, samples = make(name)
    order, bad = case.order or range(len(samples)), samples[5]
    decoded = bad[0] if "samples with targets" in case.kinds else bad
    options: dict[str, Any] = {"decode": functools.partial(failing, case.decode, decoded), "batch_size": 4}
    with Feeder(source, **options) as feeder, pytest.raises(aiofeed.errors.DecodeError, match="it is bad"):
        list(feeder)
    kept = [samples[index] for index in order if index != 5]
    for action, count in (("skip", len(kept)), ("replace", len(samples))):
        policy = aiofeed.FailurePolicy(action, max_failures=5)  # type: ignore[arg-type]
        with Feeder(source, on_error=policy, **options) as feeder:
            found = [plain(sample) for batch in feeder for sample in samples_in(batch)]
        assert (len(found), {*found}) == (count, {*kept})
        assert [each for each, known in zip(found, kept, strict=False) if each == known][:4] == kept[:4]


@pytest.mark.parametrize("shuffle", [False, True, "keyed", "window"])
@pytest.mark.parametrize("name", EVERY_SOURCE)
def test_every_source_goes_on_with_other_ranks(make: Callable[[str], Made], name: str, shuffle: Any) -> None:
    """After a batch of each of two ranks, four have the other samples; some come twice, so that all have as many."""
    made = make(name)
    if sentences(REFUSED, made.case.kinds, [f"shuffle={shuffle}" if shuffle is True else f'shuffle="{shuffle}"']):
        return
    options = {"decode": made.case.decode, "batch_size": 2, "shuffle": shuffle, "pad": True}
    found = resumed(made.source, reader_of("resume"), **options)
    assert {*found} == {*made.samples}
    assert len(found) - len(made.samples) == -len(made.samples) % 4


@pytest.mark.parametrize("name", [name for name, case in EVERY_SOURCE.items() if "a stream" not in case.kinds])
def test_every_source_passes_the_check(make: Callable[[str], Made], name: str) -> None:
    """``check_source`` accepts it."""
    made = make(name)
    check_source(made.source, decode=made.case.decode)


def keyed(source: Any, **options: Any) -> list[tuple[Any, Any]]:
    """The key of each sample of an epoch, with the sample."""
    with Feeder(source, keys=True, **options) as feeder:
        epoch: list[Any] = list(feeder)
    for batch, keys in epoch:
        assert len(keys) == len(samples_in(batch))
    return [pair for batch, keys in epoch for pair in zip(keys, map(plain, samples_in(batch)), strict=True)]


@pytest.mark.parametrize("name", EVERY_SOURCE)
def test_every_source_names_its_samples(make: Callable[[str], Made], name: str) -> None:
    """With ``keys=True`` each sample comes with its own key, in whichever order, thread or place it is made."""
    made = make(name)
    options: dict[str, Any] = {"decode": made.case.decode, "batch_size": 5}
    found = keyed(made.source, **options)
    assert [sample for _, sample in found] == [made.samples[at] for at in made.case.order or range(len(made.samples))]
    assert len({key for key, _ in found}) == len(made.samples)
    ways = [
        {"shuffle": True},
        {"in_order": "samples"},
        {"cache": "host"},
        {"limits": aiofeed.Limits(prefetch_batches=1)},
    ]
    for way in ways:
        try:
            Feeder(made.source, **options, **way)
        except (TypeError, ValueError):  # of a pair that another test checks
            continue
        again = keyed(made.source, **options, **way)
        assert {*again} == {*found}
        assert len(again) == len(found)


# --- mixtures ---


def form_of(sample: Any) -> Any:
    """The structure of a plain sample, with shapes."""
    if len(sample) == 3 and isinstance(sample[-1], bytes):
        return sample[1]
    return tuple([each if isinstance(each, str) else form_of(each) for each in sample])


def problem_of_mixture(one: Made, other: Made) -> str:
    """What is wrong with the mixture of two sources, each with its decoder; empty: nothing."""
    kinds = one.case.kinds, other.case.kinds
    if form_of(one.samples[0]) != form_of(other.samples[0]):
        kinds = {*kinds[0], "samples of one structure and shape"}, {*kinds[1], "samples of another"}
    said, late = [sentences(rows, *kinds) + sentences(rows, *kinds[::-1]) for rows in (MIXED, MIXED_UNKNOWN_BEFORE)]
    decode = {name: made.case.decode for name, made in (("one", one), ("other", other)) if made.case.decode}
    streams: Any = {} if "a stream" not in {*kinds[0], *kinds[1]} else {"weights": [1, 1], "at_end": "leave out"}
    try:
        mixture = aiofeed.Mixture({"one": one.source, "other": other.source}, decode=decode or None, **streams)
        feeder: Feeder[Any] = Feeder(mixture, batch_size=4)
    except (TypeError, ValueError) as error:
        return "" if any(text in str(error) for text in said) else f"refused, not {said}: {error}"
    with feeder:
        try:
            found = [plain(sample) for batch in feeder for sample in samples_in(batch)]
        except aiofeed.FeedError as error:
            return "" if any(text in str(error) for text in late) else f"late: {type(error).__name__}: {error}"
    samples = [*one.samples, *other.samples]
    if said or late or not Way({}, range(len(samples))).gives(found, samples):
        return f"gives {found}, not {said or late or samples}"
    return ""


def problem_of_one_decoder(one: Made, other: Made) -> str:
    """What is wrong with the mixture of two sources of bytes, with one decoder for all; empty: nothing."""
    mixture = aiofeed.Mixture({"one": one.source, "other": other.source})
    with Feeder(mixture, batch_size=4, decode=row_in) as feeder:
        found = [plain(sample) for batch in feeder for sample in samples_in(batch)]
    samples = [
        sample
        for made in (one, other)
        for sample in (made.samples if "samples with targets" in made.case.kinds else map(plain, X))
    ]
    return "" if Way({}, range(len(samples))).gives(found, samples) else f"gives {found}, not {samples}"


@pytest.mark.parametrize("name", EVERY_SOURCE)
def test_every_source_in_a_mixture(make: Callable[[str], Made], name: str) -> None:
    """A mixture with itself, with the next source, and with sources of three kinds has all samples of both."""
    names = [*EVERY_SOURCE]
    one, next_one = make(name), names[(names.index(name) + 1) % len(names)]
    others = {other: make(other) for other in (next_one, "Files", "Dataset", "Table of NumPy")} | {name: one}
    found = {other: problem_of_mixture(one, made) for other, made in others.items()}
    assert {other: wrong for other, wrong in found.items() if wrong} == {}
    if "encoded samples" in one.case.kinds and "samples with targets" not in one.case.kinds:
        assert problem_of_one_decoder(one, others["Files"]) == ""


@pytest.mark.slow
def test_all_mixtures_of_two_sources(make: Callable[[str], Made]) -> None:
    """Each source in a mixture with each other: the samples of both, or the sentence of the table."""
    made = {name: make(name) for name in EVERY_SOURCE}
    found = {pair: problem_of_mixture(*(made[name] for name in pair)) for pair in itertools.product(made, made)}
    assert {pair: wrong for pair, wrong in found.items() if wrong} == {}
