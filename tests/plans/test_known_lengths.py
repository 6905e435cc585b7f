"""Lengths that sources know without decoding: they are those of the samples, and plans take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import Feeder, Pack, Table, TokenBudget
from aiofeed.kernel.core.faces import BaseSource
from aiofeed.kernel.feeder.arguments import as_source
from aiofeed.plans.length_plans import first_length
from tests.support.token_files import write_raw

pa = pytest.importorskip("pyarrow")

SIZES = [3, 1, 4, 1, 5, 2, 6]
LISTS = [list(range(size)) for size in SIZES]
LEROBOT = Path(__file__).parents[1] / "data/lerobot/av1"


def table(kind: Any = None) -> Any:
    """Rows whose first column with a length is ``tokens``."""
    columns = {"number": SIZES, "text": [*"abcdefg"], "tokens": pa.array(LISTS, kind), "pair": [[1.5, 2.5]] * 7}
    return pa.concat_tables([pa.table(columns).slice(0, 3), pa.table(columns).slice(3)])


def written(folder: Path) -> str:
    """Row groups of three rows."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(table(), folder / "t.parquet", row_group_size=3)
    return str(folder / "t.parquet")


def arrow_file(folder: Path) -> str:
    """The rows in a file that is mapped."""
    with pa.ipc.new_file(folder / "t.arrow", table().schema) as file:
        file.write_table(table())
    return str(folder / "t.arrow")


def tokens(folder: Path, **options: Any) -> Any:
    """Windows of four tokens."""
    write_raw(folder / "x.bin", np.arange(40))
    return aiofeed.Tokens(folder / "x.bin", 4, **options)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "Table of Arrow": lambda _: Table(table()),
    "of large lists": lambda _: Table(table(pa.large_list(pa.int16()))),
    "of a file": lambda folder: Table(arrow_file(folder)),
    "of Parquet": lambda folder: Table(written(folder)),
    "of Parquet, one column": lambda folder: Table(written(folder), data="tokens"),
    "of one column and a target": lambda _: Table(table(), data="tokens", target="number"),
    "of lists of one length": lambda _: Table(table(), ["pair"]),
    "a part": lambda _: Table(table())[[5, 0, 3]],
    "a mixture": lambda folder: aiofeed.Mixture({"a": Table(table()), "b": Table(written(folder))[2:5]}).whole,
    "Tokens": tokens,
    "Tokens with targets": lambda folder: tokens(folder, targets=True),
    "Arrays": lambda _: aiofeed.Arrays({"x": np.arange(20)}, window=range(3)),
    "TensorDataset": lambda _: torch.utils.data.TensorDataset(torch.arange(5), torch.zeros(5, 3)),
    "Episodes": lambda _: aiofeed.Episodes(LEROBOT, features=["timestamp", "action"]),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", SOURCES)
def test_lengths_are_those_of_decoded_samples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first part and of each part by its name; a plan takes them, and reads no sample for that."""
    source = SOURCES[name](tmp_path)
    with Feeder(source, batch_size=2, collate_fn=list) as feeder:
        samples = [sample for batch in feeder for sample in batch]
    known = as_source(source)
    assert known.lengths("").tolist() == [first_length(sample) for sample in samples]  # type: ignore[union-attr]
    for part in samples[0] if isinstance(samples[0], dict) else ():
        expected = [first_length(sample[part]) for sample in samples]
        found = known.lengths(part)
        assert (expected if None not in expected else None) == (None if found is None else found.tolist())
    monkeypatch.setattr(TokenBudget, "measure", None)
    for lengths in (None, "measure"):
        plan: Any = TokenBudget(lengths, 60)  # type: ignore[arg-type]
        with Feeder(source, batch_size=plan, collate_fn=list):
            assert plan.lengths.tolist() == known.lengths("").tolist()  # type: ignore[union-attr]


NULLS: dict[str, Any] = {
    "a null list": [[1], None],
    "a null token": [[1, None], [2]],
    "texts": [["a"], ["b", "c"]],
    "lists of lists": [[[1], [2, 3]], [[4]]],
}


@pytest.mark.parametrize("name", NULLS)
def test_lengths_that_only_decoding_tells(name: str) -> None:
    """Where reading a row may fail or give something else, the answer is that they are not known."""
    assert Table(pa.table({"tokens": NULLS[name]})).lengths("tokens") is None


def test_a_plan_without_lengths_forgets_those_of_another_source() -> None:
    """A source that does not know them is refused, also after one that does; and so is one with ``decode=``."""
    plan = TokenBudget(max_tokens=8)
    Feeder(Table(table()), batch_size=plan, collate_fn=list).close()
    for source, decode in (([torch.arange(3)] * 7, None), (Table(table()), lambda row: row)):
        with pytest.raises(ValueError, match="measures the items of a Stream: pass lengths="):
            Feeder(source, decode=decode, batch_size=plan, collate_fn=list)


def test_what_an_object_of_the_user_calls_lengths() -> None:
    """It is no member of the source."""

    class Own:
        lengths = (1, 2)

        def __len__(self) -> int:
            return 2

        def key(self, index: int) -> str:
            return str(index)

        async def read(self, index: int) -> bytes:
            return b"a" * (index + 1)

    plan: Any = TokenBudget("measure", 8)
    Feeder(Own(), decode=list, batch_size=plan, collate_fn=list).close()
    assert plan.lengths.tolist() == [1, 2]
    assert isinstance(as_source(Own()), BaseSource)


@pytest.mark.parametrize(
    ("columns", "named"),
    [(["number", "tokens"], "['number']"), (["text", "tokens"], "['text']"), (None, "['number', 'text']")],
)
def test_rows_that_are_no_documents(columns: Any, named: str, tmp_path: Path) -> None:
    """`Pack` names the columns when the feeder is made."""
    for given in (table(), written(tmp_path)):
        with pytest.raises(ValueError, match="is not possible with Pack") as raised:
            Feeder(Table(given, columns), batch_size=Pack(SIZES, 8))
        assert named in str(raised.value)
