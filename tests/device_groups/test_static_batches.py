"""Static batches: fixed addresses, correct contents, and the errors where they are impossible."""

import pickle

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.kernel.core.pytree import leaves
from aiofeed.kernel.runtime.tensors import is_tensor
from tests.support.device_cases import ACCELERATORS, EVERY_DEVICE, on
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until


def feeder_of(x, **options):
    return aiofeed.Feeder(
        TensorDataset(x),
        **({"batch_size": 4, "static_batches": True, "drop_last": True, "device": SimulatedDevice()} | options),
    )


class TestAddresses:
    @on("random", *ACCELERATORS, "host")
    def test_the_same_tensors(self, device):
        """Over epochs and after ``close`` every batch is the same tensor objects with new contents."""
        x = torch.arange(22.0)
        feeder = feeder_of(x, device=device.backend)
        tensors, seen = set(), []
        for _ in range(2):
            with feeder:
                for _ in range(2):
                    for [batch] in feeder:
                        tensors.add((id(batch), batch.data_ptr()))
                        seen.append(batch.tolist())
        assert len(tensors) == 1
        assert seen == [list(range(start, start + 4)) for start in range(0, 20, 4)] * 4

    def test_several(self):
        """Each device has its own fixed tensors."""
        with feeder_of(torch.arange(8.0), device=["cpu", "cpu"]) as feeder:
            kept = [[tensor for tensor in leaves(batch) if is_tensor(tensor)] for batch in feeder]
        assert kept[0][0] is kept[1][0]
        assert kept[0][1] is kept[1][1]
        assert [tensor.tolist() for tensor in kept[0]] == [[4, 5], [6, 7]]

    def test_other_leaves_change(self):
        """Leaves that are not tensors are those of the current batch."""

        def collate(samples):
            return {"x": torch.stack([sample[0] for sample in samples]), "key": str(samples[0][0].item())}

        with feeder_of(torch.arange(8.0), collate_fn=collate) as feeder:
            assert [batch["key"] for batch in feeder] == ["0.0", "4.0"]

    def test_channels_last(self, jpeg_folder):
        """Images keep their channels_last memory format."""
        source = aiofeed.ImageFolder(jpeg_folder)
        options = {"decode": aiofeed.DecodeImage(32), "batch_size": 6, "drop_last": True}
        with (
            aiofeed.Feeder(source, **options) as plain,
            aiofeed.Feeder(source, device=SimulatedDevice(), static_batches=True, **options) as static,
        ):
            for (images, labels), (there, labels_there) in zip(plain, static, strict=True):
                assert there.is_contiguous(memory_format=torch.channels_last)
                assert torch.equal(there.cpu(), images)
                assert torch.equal(labels_there.cpu(), labels)

    def test_first_batch_under_inference_mode(self):
        """A feeder whose first batch comes under inference_mode works outside it."""
        with feeder_of(torch.arange(8.0), device=None) as feeder:
            with torch.inference_mode():
                iterator = iter(feeder)
                next(iterator)
            assert next(iterator)[0].tolist() == [4, 5, 6, 7]

    def test_backward_through_an_overwritten_batch_is_an_error(self):
        """torch raises an error if a gradient needs a batch that was overwritten."""
        weights = torch.ones(4, requires_grad=True)
        with feeder_of(torch.arange(8.0), device=None) as feeder:
            iterator = iter(feeder)
            loss = (next(iterator)[0] * weights).sum()
            next(iterator)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_pickle(self):
        """A pickled copy of a feeder creates its own tensors."""
        feeder = feeder_of(torch.arange(8.0), device=None)
        with feeder:
            first = next(iter(feeder))[0]
        with pickle.loads(pickle.dumps(feeder)) as other:
            assert next(iter(other))[0] is not first

    def test_look_ahead(self):
        """The next batch is copied to the device before the consumer asks for it."""
        device = SimulatedDevice(latency="late")
        with feeder_of(torch.arange(40.0), device=device) as feeder:
            iterator = iter(feeder)
            next(iterator)
            until(lambda: device.copies == 3)  # two batches are copied ahead
            next(iterator)


LENGTHS = [1 + index * 7 % 29 for index in range(90)]


class Sequences:
    """Samples of different lengths: the index, as often as the sample is long."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.full((LENGTHS[index],), index)


def buckets_of(multiple_of=10, **options):
    """A feeder whose batches have the shapes [5, 10], [4, 20] and [3, 30]."""
    options = {
        "batch_size": aiofeed.Buckets(LENGTHS, [11, 21], [5, 4, 3]),
        "shuffle": True,
        "drop_last": True,
    } | options
    return aiofeed.Feeder(Sequences(), collate_fn=aiofeed.pad_collate(-1, multiple_of=multiple_of), **options)


def lists(batch):
    return [tensor.tolist() for tensor in batch]


class TestBuckets:
    @pytest.mark.parametrize("options", [{}, {"shard": (1, 2)}, {"in_order": False, "shuffle": False}], ids=str)
    @on("random", "host")
    def test_each_bucket_keeps_its_tensors(self, device, options):
        """Over epochs and after ``close``; the contents are those of other tensors."""
        tensors, seen = {}, []
        static = buckets_of(device=device.backend, static_batches=True, **options)
        with buckets_of(**options) as plain:
            expected = [lists(batch) for _ in range(3) for batch in plain]
        for _ in range(3):
            with static:
                for batch in static:
                    tensors.setdefault(tuple(batch[0].shape), set()).add(tuple((id(x), x.data_ptr()) for x in batch))
                    seen.append(lists(batch))
        assert sorted(tensors) == [(3, 30), (4, 20), (5, 10)]
        assert [len(kept) for kept in tensors.values()] == [1, 1, 1]
        assert len({address for kept in tensors.values() for pairs in kept for _, address in pairs}) == 6
        assert sorted(seen) == sorted(expected) if "in_order" in options else seen == expected

    def test_several_devices(self):
        """Each device has the tensors of each bucket."""
        with buckets_of(device=["cpu", "cpu"], static_batches=True) as feeder, buckets_of() as plain:
            addresses = set()
            for parts, batch in zip(feeder, plain, strict=True):
                addresses |= {part[0].data_ptr() for part in parts}
                assert torch.equal(torch.cat([part[0] for part in parts]), batch[0])
        assert len(addresses) == 6

    @on(*EVERY_DEVICE)
    def test_slow_consumers(self, device):
        """Kernels queued on the streams of a consumer read the batches that they were queued for."""
        backend, streams, copies = device.backend, device.in_turn(device.backend), []
        with buckets_of(device=backend, static_batches=True) as feeder, buckets_of() as plain:
            expected = [lists(batch) for _ in range(4) for batch in plain]
            for _ in range(4):
                iterator = iter(feeder)
                for number in range(len(feeder)):
                    with backend.use_stream(streams[number % 3]):
                        batch = next(iterator)
                        device.slow(backend)
                        copies.append([tensor.clone() for tensor in batch])
            for stream in streams:
                backend.record(stream).synchronize()
            assert [lists(copy) for copy in copies] == expected

    @pytest.mark.parametrize("stop", [1, 5, 12])
    def test_resuming(self, stop):
        """After ``break`` the same feeder, and by its state another one, continue in the tensors of the buckets."""
        with buckets_of() as plain:
            expected = [lists(batch) for batch in plain]
        with buckets_of(static_batches=True) as feeder, buckets_of(static_batches=True) as other:
            tensors, seen = {}, []
            for batch in feeder:
                tensors[batch[0].shape] = batch[0]
                seen.append(lists(batch))
                if len(seen) == stop:
                    break
            state = feeder.state_dict()
            for resumed in (feeder, other, pickle.loads(pickle.dumps(other))):
                resumed.load_state_dict(state)
                rest = []
                for batch in resumed:
                    rest.append(lists(batch))
                    assert (batch[0] is tensors.setdefault(batch[0].shape, batch[0])) == (resumed is feeder)
                assert seen + rest == expected
                resumed.close()

    def test_more_shapes_than_buckets(self):
        """The error shows the shapes and how to pad."""
        feeder = buckets_of(multiple_of=1, shuffle=False, static_batches=True)
        with (
            feeder,
            pytest.raises(
                aiofeed.errors.DeviceCopyError, match=r"each of 3 buckets.*pad_collate\(multiple_of"
            ) as error,
        ):
            list(feeder)
        assert str(error.value).count("torch.int64[") == 8

    def test_incomplete_batches(self):
        """Without ``drop_last`` buckets are refused; so are batches of other plans."""
        with pytest.raises(ValueError, match="the last one may be smaller: pass drop_last=True"):
            buckets_of(static_batches=True, drop_last=False)
        with pytest.raises(ValueError, match="static_batches=True is not possible"):
            buckets_of(static_batches=True, batch_size=aiofeed.TokenBudget(LENGTHS, 60))


class TestRefused:
    def test_last_batch(self):
        """A smaller last batch is refused unless drop_last or the length excludes it."""
        with pytest.raises(ValueError, match=r"the last one may be smaller: pass drop_last=True"):
            feeder_of(torch.arange(10.0), drop_last=False)
        with feeder_of(torch.arange(8.0), drop_last=False) as feeder:
            assert len(list(feeder)) == 2

    def test_sampler(self):
        """A sampler is refused without drop_last, because its number of samples is not known."""
        with pytest.raises(ValueError, match="the last one may be smaller"):
            feeder_of(torch.arange(8.0), drop_last=False, sampler=range(8))

    def test_skip(self):
        """on_error="skip" is refused because it makes batches smaller; "replace" is allowed."""
        with pytest.raises(ValueError, match="on_error='replace'"):
            feeder_of(torch.arange(8.0), on_error="skip")
        feeder_of(torch.arange(8.0), on_error="replace")

    def test_no_bool(self):
        """``static_batches`` must be a bool."""
        with pytest.raises(TypeError, match="static_batches must be True or False"):
            feeder_of(torch.arange(8.0), static_batches=1)

    @pytest.mark.parametrize("other", ["shape", "dtype", "structure"])
    def test_another_batch(self, other):
        """A batch with another shape, dtype or structure is an error that describes both batches."""

        def collate(samples):
            x = torch.stack([sample[0] for sample in samples])
            if x[0] == 0:
                return {"x": x}
            return {"shape": {"x": x[:2]}, "dtype": {"x": x.long()}, "structure": {"y": x}}[other]

        with feeder_of(torch.arange(8.0), collate_fn=collate) as feeder:
            iterator = iter(feeder)
            next(iterator)
            with pytest.raises(aiofeed.errors.DeviceCopyError, match=r"\{'x': 'torch.float32\[4\]'\}, this one is \{'"):
                next(iterator)
            with pytest.raises(StopIteration):
                next(iterator)

    def test_containers_that_do_not_print(self):
        """A different shape is an error even if the container's ``repr`` hides it; nothing is broadcast."""

        class Silent(dict):
            def __repr__(self):
                return "silent"

        def collate(samples):
            x = torch.stack([sample[0] for sample in samples])
            return Silent(x=x if x[0] == 0 else x[:1])

        feeder = feeder_of(torch.arange(8.0), collate_fn=collate)
        with feeder, pytest.raises(aiofeed.errors.DeviceCopyError, match="all alike"):
            list(feeder)

    def test_tuples_of_torch(self):
        """The tensors that a function of torch returns are fixed, too, and keep their places."""
        feeder = feeder_of(torch.arange(8.0), transform=lambda batch: (batch[0].view(2, 2).max(1), batch[0]))
        found = []
        with feeder:
            for best, x in feeder:
                found.append((best.values, best.indices, x))
                assert best.values.tolist() == x.view(2, 2).max(1).values.tolist()
                assert best.indices.tolist() == [1, 1]
        assert all(one is other for one, other in zip(*found, strict=True))

    def test_sparse(self):
        """Sparse tensors are refused."""
        feeder = feeder_of(torch.arange(8.0), device=None, transform=lambda batch: batch[0].to_sparse())
        with feeder, pytest.raises(aiofeed.errors.DeviceCopyError, match="takes dense tensors; on cpu"):
            list(feeder)
