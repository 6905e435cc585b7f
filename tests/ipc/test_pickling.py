"""Batches in shared memory: which bytes go where, and when a slot is written again."""

from __future__ import annotations

import gc
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from aiofeed.ipc.pickling import SlotStorage, dump_batch, load_batch
from aiofeed.ipc.ring import Ring, Slot, SlotPool
from aiofeed.kernel.runtime.buffers import DropTracker
from tests.support.loader_parts import same


class Both:
    """Both ends of a connection in one process."""

    def __init__(self) -> None:
        self.pool = SlotPool(4, "", single_reader=True)
        self.ring = Ring()
        self.known: set[int] = set()
        self.dropped: DropTracker[tuple[Slot, list[object]]] = DropTracker()

    def send(self, batch: Any, slot: Slot | None = None, *, shared: bool = True) -> Any:
        slot = slot or self.pool.lease()
        data, extents = dump_batch(batch, slot, shared=shared)
        segments, descriptors, retired = self.pool.introduce(slot.segments, self.known)
        self.ring.map_segments(segments, descriptors, retired)
        result, owners = load_batch(data, extents, self.ring)
        left: list[object] = [None] * len(owners)
        for owner in owners:
            self.dropped.watch(owner, (slot, left))
        self.extents = extents
        return result

    def release(self) -> int:
        """Free the slots whose memory was dropped; returns how many."""
        gc.collect()
        freed = 0
        for slot, left in self.dropped.collected():
            left.pop()
            if not left:
                slot.give_back()
                freed += 1
        return freed

    def close(self) -> None:
        self.pool.close()
        self.ring.close()


def test_a_batch_arrives_as_it_was() -> None:
    both = Both()
    batch = {"large": torch.randn(300, 300), "small": torch.ones(3), "array": np.random.rand(200, 200), "text": ["a"]}
    assert same(both.send(batch), batch)
    both.close()


def test_a_slot_is_free_when_the_last_view_is_dropped() -> None:
    """A view, an array and a storage of a batch each keep its memory; the memory is used again after them."""
    both = Both()
    batch = both.send([torch.zeros(50_000), np.zeros(50_000)])
    address = batch[0].data_ptr()
    keep = [batch[0][5:9], batch[1][3:], batch[0].untyped_storage()]
    del batch
    for _ in range(3):
        assert both.release() == 0
        keep.pop()
    assert both.release() == 1
    assert both.send([torch.ones(50_000)])[0].data_ptr() == address
    both.close()


def test_a_kept_batch_is_not_overwritten() -> None:
    """Other batches get other memory while a batch is in use."""
    both = Both()
    kept = [both.send(torch.full((30_000,), float(number))) for number in range(5)]
    for number in range(5, 40):
        batch = both.send(torch.full((30_000,), float(number)))
        assert bool((batch == number).all())
        del batch
        both.release()
    assert all(bool((batch == number).all()) for number, batch in enumerate(kept))
    del kept
    both.close()


def test_small_memory_is_copied() -> None:
    """Memory below 64 KiB keeps no slot, and below 2 KiB uses none."""
    both = Both()
    small = both.send([torch.ones(100), np.ones(100)])
    assert not both.extents
    medium = both.send([torch.ones(5_000)])
    assert len(both.extents) == 1
    assert both.release() == 0
    assert len(both.dropped) == 0
    small[0].add_(1)
    medium[0].add_(1)
    assert float(small[0][0]) == float(medium[0][0]) == 2
    both.close()


def test_a_batch_that_is_not_shared() -> None:
    """With ``shared=False`` all memory is in the pickle, and writable."""
    both = Both()
    batch = both.send([torch.zeros(50_000), np.zeros(50_000)], shared=False)
    assert not both.extents
    batch[0].add_(1)
    batch[1] += 1
    assert float(batch[0].sum()) == batch[1].sum() == 50_000
    both.close()


def test_default_collate_writes_into_the_slot() -> None:
    """A stacked batch is made in the slot; ``in_use`` shows whether the worker still refers to it."""
    both, storage = Both(), SlotStorage()
    slot = both.pool.lease()
    storage.begin(slot)
    shared = storage.new_shared(4 * 60_000)
    stacked = torch.stack([torch.ones(30_000), torch.zeros(30_000)], out=torch.empty(0).set_(shared, 0, (2, 30_000)))
    used = slot.used
    batch = both.send(stacked, slot)
    assert slot.used == used
    assert same(batch, stacked)
    assert storage.in_use
    del stacked, shared
    assert not storage.in_use
    storage.begin(None)
    assert storage.new_shared(64).nbytes() == 64
    del batch
    both.close()


def test_torchs_own_storages_are_restored() -> None:
    """``installed`` replaces torch's function for its time only."""
    original = torch.UntypedStorage._new_shared
    with SlotStorage().installed():
        assert default_collate([torch.ones(2)] * 2).tolist() == [[1, 1], [1, 1]]
        assert torch.UntypedStorage._new_shared != original
    assert torch.UntypedStorage._new_shared == original


def test_views_of_a_large_storage() -> None:
    """A view is sent without the rest of its storage, unless that is sent, too."""
    both = Both()
    table = torch.arange(1_000_000.0).reshape(1000, 1000)
    row = both.send(table[3])
    assert row.untyped_storage().nbytes() == 4000
    assert same(row, table[3])
    row, whole = both.send([table[3], table])
    whole[3] = 7
    assert row.tolist() == [7.0] * 1000
    del row, whole
    both.close()


def storage_of(*tensors: torch.Tensor) -> int:
    """The size of the storage that tensors share."""
    [(_, nbytes)] = {(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors}
    return nbytes


def test_overlapping_views_of_a_large_storage() -> None:
    """Views that overlap share memory in one part of their storage, whatever their dtypes, strides and order."""
    both = Both()
    table = torch.arange(400_000, dtype=torch.int32)
    inputs, targets = both.send((table[1000:5000], table[1001:5001]))
    inputs[100:200] = -1
    assert targets.tolist() == [*range(1001, 1100), *[-1] * 100, *range(1200, 5001)]
    assert storage_of(inputs, targets) < 4 * 4010
    # The third joins the parts of the others; an item of eight bytes does not begin where one of four does.
    odd, eight, columns, apart = both.send(
        [
            table[3:500],
            {"a": table.view(torch.int64)[400:800]},
            (table[:1000].view(100, 10)[:, 3],),
            table[200_000:200_010],
        ]
    )
    (columns,), eight = columns, eight["a"]
    assert same([odd, eight, columns], [table[3:500], table.view(torch.int64)[400:800], table[3:1000:10]])
    assert storage_of(odd, eight, columns) < 4 * 1610
    assert storage_of(apart) == 40
    columns.fill_(7)
    assert odd[::10].tolist() == [7] * 50
    assert eight.view(torch.int32)[3].item() == 7
    plain = torch.arange(90_000.0)
    leaf, view = both.send([plain[:3].requires_grad_(), plain[1:4]])  # torch sends the first with all of its storage
    leaf.detach().fill_(5)
    assert view[:2].tolist() == [5, 5]
    empty, full = both.send([table[:0], table[:300]])
    assert empty.numel() == 0
    assert same(full, table[:300])
    del inputs, targets, odd, eight, columns, apart, full, empty, leaf, view
    both.close()


SWAPPED = ">" if sys.byteorder == "little" else "<"


class Named(np.ndarray[Any, Any]):
    """A class of arrays that derives from numpy's."""


def arrays_of(dtype: np.dtype[Any]) -> dict[str, Any]:
    """Arrays of a dtype that are pickled in different ways."""
    whole = (np.arange(60 * 64).reshape(60, 64) % 50).astype(np.int64).astype(dtype)
    fixed = whole.copy()
    fixed.flags.writeable = False
    records = np.zeros(300, [("swapped", dtype), ("own", "=i4"), ("several", dtype, (2,))])
    records["swapped"], records["own"] = whole.ravel()[:300], np.arange(300)
    return {
        "whole": whole,
        "in columns": np.asfortranarray(whole),
        "strided": whole[::2, 1::3],
        "reversed": whole[::-1],
        "repeated": np.broadcast_to(whole[0], (40, 64)),
        "read-only": fixed,
        "small": whole[:1, :2].copy(),
        "empty": whole[:0],
        "0-d": whole[1, 1:2].reshape(()),
        "number": whole[1, 1],
        "of a class": whole.view(Named),
        "masked": np.ma.masked_array(whole, whole == whole[0, 3]),
        "in objects": np.array([whole, None], object),
        "twice": [whole, whole],
        "records": records,
        "record": records[3],
        "field": records["swapped"],
        "record array": records.view(np.recarray),
        "dtype": dtype,
    }


def description(value: Any) -> Any:
    """What a batch has, and how it lies in memory."""
    if isinstance(value, np.ndarray):
        content = [description(each) for each in value] if value.dtype.hasobject else np.asarray(value).tobytes()
        mask = value.mask.tobytes() if isinstance(value, np.ma.MaskedArray) else None
        return type(value), value.dtype.descr, value.shape, value.flags.writeable, content, mask
    if isinstance(value, list):
        return [description(each) for each in value], value[0] is value[-1]
    return type(value), repr(value), value.descr if isinstance(value, np.dtype) else None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["f4", "i2", "u8", "f2", "c8", "M8[ns]", "m8[s]", "U3"])
def test_numbers_of_another_byte_order_arrive_as_from_torch(kind: str, shared: bool) -> None:
    """Arrays in the order of this machine, and structures as they were: what the older protocol of torch does."""
    for order in (SWAPPED, "="):
        for name, value in arrays_of(np.dtype(order + kind)).items():
            both = Both()
            expected = pickle.loads(bytes(ForkingPickler.dumps(value)))
            assert description(both.send(value, shared=shared)) == description(expected), (order, name)
            both.close()
    assert pickle.loads(bytes(ForkingPickler.dumps(np.zeros(3, SWAPPED + kind)))).dtype.isnative
