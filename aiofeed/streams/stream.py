"""``Stream``: an iterable as a source. ``streams/stream_epochs.py`` forms batches of its items."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, ClassVar

from aiofeed.kernel.core.errors import FeedError, ReadError, StateError, as_exception
from aiofeed.kernel.core.faces import BaseSource, Exclusion
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.types import Traits, public, takes_keyword
from aiofeed.kernel.core.validation import check_bool, check_int_from, counted, explain_arguments, is_async_function
from aiofeed.kernel.runtime.cancellation import clear_cancellation
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.kernel.sampling.schedule import Schedule
from aiofeed.plans.length_plans import LengthPlan
from aiofeed.streams.stream_epochs import Blocks, ItemBlock, Measured, Shard, Snapshot, StreamOrder, items_of

log: logging.Logger = logging.getLogger("aiofeed.sources")

# Most seconds that a closed reader waits for the iterable: less than an event loop waits for its tasks.
CLOSE_S = 4.0
# Items of an async iterable after which other tasks of the loop get a turn.
SHARE = 32

_END: Any = object()


@public
@explain_arguments({"decode": "pass decode= to Feeder, as for every source"})
class Stream(BaseSource):
    """An iterable whose items are the samples: of one that has no index, such as a Hugging Face streaming dataset.

    Example:
        ```python
        import aiofeed


        def lines():
            with open("photos.csv") as file:
                yield from file


        for batch in aiofeed.Feeder(aiofeed.Stream(lines), decode=len, batch_size=4):
            print(batch)
        ```

    Each epoch iterates it once, in one thread, ahead of the training; an async iterable on the event loop of the
    feeder. ``Feeder(decode=)`` decodes the items in the decode threads; without it they are collated as they are. Every
    rank reads all items and uses every R-th of them, so that all ranks have the same number of batches. ``Buckets``,
    ``TokenBudget`` and ``Pack`` without ``lengths=`` form batches of items by lengths that are measured as they come.

    An epoch is resumed by the iterable's own ``state_dict`` and ``load_state_dict``, if it has both, as those of
    Hugging Face datasets and ``torchdata.nodes.Loader``. Otherwise its first items are read again and dropped. Both
    need an iterable that gives the same items in the same epoch.

    An error of the iterable is raised after the complete batches before it, for any ``on_error``. ``close`` cannot
    interrupt a call of ``next``: it waits up to 4 s, then leaves its daemon thread behind with a log line.

    Args:
        make_iterable: An iterable or async iterable that can be iterated more than once, such as a torch
            ``IterableDataset``; its ``set_epoch(epoch)`` is called before each epoch if it has one. Or a function that
            returns the iterable of an epoch, such as a generator function or an async generator function; it gets the
            number of the epoch if it has a parameter ``epoch``.
        shuffle_buffer: Shuffle the items in consecutive groups of this size, by the feeder's seed; 0: keep their order.
            Two groups are in memory: one is read while the other is used.
        sharded: Whether the iterable gives each rank items of its own. Ranks may then have different numbers of
            batches, which hangs collective operations: stop all ranks after the same number of steps. Each rank saves
            and loads its own state, and the world size cannot change within an epoch.
        length: The number of items of an epoch, by default ``len()`` of the iterable. Without both, the feeder has no
            ``len()``. An epoch with fewer items ends with an error.

    Raises:
        TypeError: ``make_iterable`` is not iterable or callable, or is an iterator, which can be iterated only once.
        ValueError: ``shuffle_buffer`` or ``length`` is negative.
    """

    traits: Traits = Traits(decode="optional", indexed=False)
    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("shuffle=",), ("Stream",), ValueError,
         "a stream has an order of its own: pass Stream(..., shuffle_buffer=N)"),
        (("sampler=", "weights="), ("Stream",), ValueError, "a stream has no indices: choose items in the iterable"),
        (("batch_sampler=",), ("Stream",), ValueError, "a stream has no indices: pass batch_size="),
        (("a plan with lengths=",), ("Stream",), ValueError,
         "a stream has no list of lengths: pass Buckets, TokenBudget or Pack without lengths=, which measure the "
         "items"),
        (("cache=",), ("Stream",), ValueError,
         "a stream has no indices, by which a cache finds samples: leave it out"),
        (('in_order="samples"',), ("Stream",), ValueError,
         "a stream gives the items of a batch together: pass in_order=False"),
        (('engine="process"',), ("Stream",), ValueError, 'a stream is read in this process: pass engine="thread"'),
        (("retries",), ("Stream",), ValueError,
         "a stream gives each item once, so that a read cannot be timed or repeated: do that in the iterable"),
        (("max_failures as a share",), ("Stream",), ValueError,
         "a stream has no length of which it is a fraction: pass on_error=FailurePolicy(..., max_failures=100)"),
        (("exclude=",), ("Stream",), ValueError,
         "it leaves out samples of shuffle=True, False or 'keyed' only: take them out of the source"),
    )
    # fmt: on

    def __init__(
        self,
        make_iterable: Iterable[Any] | AsyncIterable[Any] | Callable[..., Iterable[Any] | AsyncIterable[Any]],
        *,
        shuffle_buffer: int = 0,
        sharded: bool = False,
        length: int | None = None,
    ) -> None:
        self._make = make_iterable
        self._length = None if length is None else check_int_from(0, "length", length)
        self.shuffle_buffer: int = check_int_from(0, "shuffle_buffer", shuffle_buffer)
        self.sharded: bool = check_bool("sharded", sharded)
        # functools.partial has no name, but a function.
        function = getattr(make_iterable, "func", make_iterable)
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._takes_epoch = False
        if isinstance(make_iterable, Iterator | AsyncIterator):
            raise TypeError(
                f"make_iterable is an iterator, a {type(make_iterable).__name__}, which gives one epoch only: pass the "
                f"function that makes it, or for a node of torchdata its torchdata.nodes.Loader"
            )
        if isinstance(make_iterable, str | bytes | os.PathLike):
            raise TypeError(f"make_iterable must give samples, got {make_iterable!r}")
        if not isinstance(make_iterable, Iterable | AsyncIterable):
            self._check_function(make_iterable)

    def _check_function(self, make: Any) -> None:
        if not callable(make):
            raise TypeError(
                f"make_iterable must be an iterable, an async iterable, or a function that returns one, got {make!r}"
            )
        if is_async_function(make):
            raise TypeError(
                f"make_iterable={self.name} is an `async def` without `yield`, whose call is no iterable: yield the "
                f"items in it"
            )
        self._takes_epoch = takes_keyword(make, "epoch")
        try:
            inspect.signature(make).bind(**self._arguments(0))
        except TypeError as error:
            raise TypeError(
                f"make_iterable is called as {self.name}() or {self.name}(epoch=...), and has other arguments: "
                f"{error}; set them with functools.partial"
            ) from None
        except ValueError:
            pass  # it has no signature

    def _arguments(self, epoch: int) -> dict[str, int]:
        return {"epoch": epoch} if self._takes_epoch else {}

    def __len__(self) -> int:
        """Return the number of items of an epoch.

        Raises:
            TypeError: It is not known.
        """
        if self.length is None:
            raise TypeError(f"{self!r} has no len(): pass Stream(length=...) if you know its number of items")
        return self.length

    @property
    def length(self) -> int | None:
        """The number of items of an epoch; ``None`` if it is not known."""
        if self._length is None and isinstance(self._make, Sized):
            return len(self._make)
        return self._length

    def __repr__(self) -> str:
        sharded = ", sharded=True" if self.sharded else ""
        return f"Stream({self.name}, shuffle_buffer={self.shuffle_buffer}{sharded})"

    def fingerprint(self) -> str:
        """Identifies the stream by its name and its arguments."""
        return repr(self)

    def key(self, index: int, /) -> str:
        """Return the name of the iterable and the number of the item."""
        return f"{self.name}[{index}]"

    async def read(self, index: int, /) -> Any:
        """Return the item of an ``ItemNumber``."""
        return (await self.read_many([index]))[0]

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of ``ItemNumber``s."""
        return items_of(indices)

    def _measured(self, item: Any) -> Any:
        """Return the sample of an item, whose length a plan measures."""
        return item

    def first_item(self, item: int) -> int:
        """Return the number of the first item to read for one in the order of the epoch: the start of its group."""
        return item - item % max(self.shuffle_buffer, 1)

    def last_before(self, epoch: int, first: int, snapshots: Iterable[Snapshot]) -> Snapshot | None:
        """Return the last of some states at an item or before, if any."""
        before = (each for each in snapshots if each.epoch == epoch and each.item <= first)
        return max(before, key=lambda each: each.item, default=None)

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that it is a stream."""
        return {"Stream": repr(self)}

    def new_order(self, schedule: Schedule, shard: Shard, plan: LengthPlan | None) -> StreamOrder:
        """Return the order of its items."""
        return StreamOrder(schedule, shard, self, plan)

    def _read_blocks(self, epoch: int, first: int, snapshot: Snapshot | None, size: int, measure: Measured) -> Blocks:
        return StreamReader(self, epoch, first, snapshot, measure).blocks(size)

    def interrupt(self, iterable: Any) -> None:
        """End a call of ``next`` that waits in another thread, if that is possible."""

    def open_epoch(self, epoch: int) -> Any:
        """Return the iterable or async iterable of an epoch.

        Raises:
            TypeError: The function returned something else.
        """
        made: Any = self._make
        if not isinstance(self._make, Iterable | AsyncIterable):
            made = self._make(**self._arguments(epoch))
            if not isinstance(made, Iterable | AsyncIterable):
                raise TypeError(f"{self.name}() must return an iterable or an async iterable, got {made!r}")
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        return made


def snapshot_of(state: Any, epoch: int, item: int) -> Snapshot:
    """Return a snapshot of a state, which the iterable may change later."""
    try:
        text = json.dumps(state)
        if json.loads(text) != state:  # a tuple becomes a list, and a number as a key a str
            return Snapshot(epoch, item, None, f"JSON changes it to {text:.200}")
    except (TypeError, ValueError) as error:
        return Snapshot(epoch, item, None, str(error))
    return Snapshot(epoch, item, text)


class StreamReader:
    """Reads one epoch of a stream, in blocks, one block ahead of its use.

    The iterable runs in one thread, or as a task of the running loop. A call of ``next`` that blocks cannot be
    interrupted: it delays the end by ``CLOSE_S``, and is left behind in a daemon thread.

    Args:
        stream: The stream.
        epoch: The number of the epoch.
        first: The number of the first item to return.
        snapshot: A state of the iterable at this item or before.
        measure: Gets the number of an item and the item; each item then comes with its length.
    """

    def __init__(
        self, stream: Stream, epoch: int, first: int, snapshot: Snapshot | None, measure: Measured = None
    ) -> None:
        self._stream = stream
        self._epoch = epoch
        self._first = first
        self._snapshot = snapshot
        self._measure = measure
        # The number of the next item.
        self._number = 0
        self._pool = ThreadPool("stream", 1)
        self._stopped = False
        self._iterable: Any = None
        self._iterator: Any = None
        # The iterable or its iterator, whichever has a state.
        self._stateful: Any = None
        self._pending: asyncio.Future[Any] | None = None

    async def blocks(self, size: int) -> Blocks:
        """Blocks of ``size`` items; the first has one more. The last block has ended or has an error.

        The state of the iterable is captured before the last item of a block, so at multiples of ``size``.
        """
        try:
            self._submit(self._open)
            block = await self._result()
            if block.error is None and isinstance(self._iterable, AsyncIterable):
                block = self._guarded(self._begin)
            dropped = self._first - self._number
            if block.error is None and dropped > 0:
                level = logging.INFO if self._number else logging.WARNING
                why = "" if self._stateful is not None else ", because it has no state_dict"
                log.log(level, "%r resumes at item %d: %d items are skipped%s", self._stream, self._first, dropped, why)
                self._start(dropped, keep=False)
                block = await self._result()
                if block.ended:
                    block.error = StateError(
                        f"the state is at item {self._first} of epoch {self._epoch}, but {self._stream!r} has ended "
                        f"after {counted(self._number, 'item')}: it must give the same items as when the state was "
                        f"saved. If skip() has set this position, pass Stream(length=...), and it finds the next epoch"
                    )
            if block.error is None:
                self._start(size + 1)
                while not (block := await self._result()).ended and block.error is None:
                    self._start(size)
                    yield block
            yield block
        finally:
            await self._close()

    def _start(self, count: int, *, keep: bool = True) -> None:
        """Start to read ``count`` items; without ``keep`` they are dropped."""
        if isinstance(self._iterable, AsyncIterable):
            self._pending = asyncio.ensure_future(self._read_async(count, keep))
        else:
            self._submit(self._read, count, keep)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self._pending = asyncio.get_running_loop().run_in_executor(self._pool, self._guarded, function, *arguments)

    async def _result(self) -> ItemBlock:
        assert self._pending is not None
        await asyncio.wait([self._pending])  # unlike `await self._pending`, does not cancel it with this task
        block: ItemBlock = self._pending.result()
        return block

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> ItemBlock:
        """Call a function with a new block, which gets its error."""
        block = ItemBlock()
        try:
            function(block, *arguments)
        except BaseException as error:  # noqa: BLE001 - the user's iterable may raise anything; the consumer raises it
            self._failed(block, error)
        return block

    def _open(self, block: ItemBlock) -> None:
        self._iterable = self._stream.open_epoch(self._epoch)
        self._restore(self._iterable)
        if not isinstance(self._iterable, AsyncIterable):
            self._begin(block)

    def _begin(self, block: ItemBlock) -> None:
        self._iterator = aiter(self._iterable) if isinstance(self._iterable, AsyncIterable) else iter(self._iterable)
        self._restore(self._iterator)

    def _restore(self, stateful: Any) -> None:
        """Load the snapshot into the iterable, or into its iterator if only that has a state.

        Raises:
            StateError: It refuses the state.
        """
        if self._stateful is not None or not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            return
        self._stateful = stateful
        if self._snapshot is not None and self._snapshot.state is not None:
            try:
                stateful.load_state_dict(json.loads(self._snapshot.state))
            except Exception as error:
                raise StateError(f"{self._stream!r} refuses its saved state: {format_error(error)}") from error
            self._number = self._snapshot.item

    def _capture(self) -> Snapshot | None:
        if self._stateful is None:
            return None
        return snapshot_of(self._stateful.state_dict(), self._epoch, self._number)

    def _read(self, block: ItemBlock, count: int, keep: bool) -> None:
        if not self._stopped and self._read_run(block, count - 1, keep):
            snapshot = self._capture() if keep else None
            if self._read_run(block, 1, keep):
                block.snapshot = snapshot

    def _read_run(self, block: ItemBlock, count: int, keep: bool) -> bool:
        """Read items until ``count`` are read, the iterable ends, or the reader is closed; return whether all are."""
        append, measure, end = block.items.append, self._measure, self._number + count
        sample_of = self._stream._measured
        for item in islice(self._iterator, count):
            if keep:
                append(item if measure is None else (item, measure(self._number, sample_of(item))))
            self._number += 1
            if self._stopped:
                return False
        block.ended = self._number < end
        return not block.ended

    async def _read_async(self, count: int, keep: bool) -> ItemBlock:
        block, snapshot = ItemBlock(), None
        try:
            for left in range(count, 0, -1):
                if left == 1 and keep:
                    snapshot = self._capture()
                item = await anext(self._iterator, _END)
                await clear_cancellation()  # the iterable may have cancelled this task
                if left % SHARE == 0:
                    await asyncio.sleep(0)  # an iterable that never waits must not hold up the loop
                if item is _END:
                    block.ended = True
                    return block
                if keep:
                    sample_of, measure = self._stream._measured, self._measure
                    block.items.append(item if measure is None else (item, measure(self._number, sample_of(item))))
                self._number += 1
            block.snapshot = snapshot
        except BaseException as error:  # noqa: BLE001 - the user's iterable may raise anything; the consumer raises it
            if not self._stopped:
                self._failed(block, error)
                await clear_cancellation()
        return block

    def _failed(self, block: ItemBlock, error: BaseException) -> None:
        """Set the error of a block, without our frames, which refer to items."""
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_globals is globals():
            traceback = traceback.tb_next
        BaseException.with_traceback(error, traceback)
        if isinstance(error, FeedError):
            block.error = error
            return
        key, cause = self._stream.key(self._number), as_exception(error)
        block.error = ReadError(
            f"cannot read {key!r}: {format_error(cause)}", key=key, index=self._number, stage="read"
        )
        block.error.__cause__ = cause

    async def _close(self) -> None:
        """Close the iterator where it runs, and end the thread; both go on if this is cancelled."""
        self._stopped = True
        if self._pending is None:
            return
        self._stream.interrupt(self._iterable)
        closing: asyncio.Future[None]
        if isinstance(self._pending, asyncio.Task):
            self._pending.cancel()
            closing = asyncio.ensure_future(self._close_on_loop(self._pending))
        else:
            closing = asyncio.get_running_loop().run_in_executor(self._pool, self._close_in_thread)
        if not (await asyncio.wait([closing], timeout=CLOSE_S))[0]:
            log.warning("%r did not return within %.0f s after it was closed and is left behind", self._stream, CLOSE_S)

    def _close_in_thread(self) -> None:
        try:
            if (close := getattr(self._iterator, "close", None)) is not None:
                close()
        except BaseException:  # the user's code may raise anything, and no consumer is left to receive it
            log.exception("close() of %r failed", self._stream)
        finally:
            self._pool.stop()

    async def _close_on_loop(self, pending: asyncio.Future[Any]) -> None:
        self._pool.stop()
        try:
            await asyncio.wait([pending])
            if (aclose := getattr(self._iterator, "aclose", None)) is not None:
                await aclose()
        except Exception:  # as above
            log.exception("aclose() of %r failed", self._stream)
