"""Batches for several devices: how they are split and copied, and the errors if that is impossible."""

import dataclasses
import pickle
import typing

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.device_groups.scatter import DeviceGroup, split
from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.kernel.devices.copier import copier_for
from aiofeed.kernel.devices.resolve import resolve_devices
from tests.support.simulated_device import SimulatedDevice


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: object


@dataclasses.dataclass
class Sample:
    image: object
    key: object


def two(latency="random"):
    return [SimulatedDevice(1, latency=latency, index=0), SimulatedDevice(2, latency=latency, index=1)]


def listed(tree):
    return aiofeed.kernel.core.pytree.map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, tree)


class TestSplit:
    @pytest.mark.parametrize(("rows", "parts"), [(6, 2), (7, 3), (2, 4), (0, 2), (1, 1)])
    def test_as_tensor_split(self, rows, parts):
        """The parts equal those of torch.tensor_split, also empty ones, and share the batch's memory."""
        batch = torch.arange(rows * 2).view(rows, 2)
        found = split(batch, parts)
        expected = torch.tensor_split(batch, parts)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
        assert [part.shape for part in found] == [part.shape for part in expected]
        assert all(part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for part in found)

    def test_structure(self):
        """Containers keep their types; lists with one entry per sample are split, and other leaves are repeated."""
        marker = object()
        batch = {
            "images": torch.arange(3),
            "pair": Pair(torch.arange(3) * 2, marker),
            "sample": Sample(torch.ones(3, 2), ["a", "b", "c"]),
            "keys": ("x", "y", "z"),
            "meta": [{"n": 1}, {"n": 2}, {"n": 3}],
            "columns": [("p", "q", "r"), ("s", "t", "u"), ("v", "w", "x")],
            "short": ["one", "two"],
            "array": np.arange(3),
            "other": np.arange(4),
            "scale": torch.tensor(0.5),
            "text": "abc",
            "nothing": None,
        }
        first, second = split(batch, 2)
        assert listed(first["images"]) == [0, 1]
        assert listed(second["images"]) == [2]
        assert type(second["pair"]) is Pair
        assert second["pair"].first.tolist() == [4]
        assert second["pair"].second is marker
        assert type(first["sample"]) is Sample
        assert first["sample"].key == ["a", "b"]
        assert second["keys"] == ("z",)
        assert second["meta"] == [{"n": 3}]
        assert first["columns"] == [("p", "q"), ("s", "t"), ("v", "w")]
        assert first["array"].tolist() == [0, 1]
        assert second["short"] == ["one", "two"]
        for name in ("other", "scale", "text", "nothing"):
            assert second[name] is batch[name]

    def test_tuples_of_torch(self):
        """What a function of torch returns is split like any tuple; other classes of tuples are repeated."""
        batch = {"best": torch.arange(6.0).view(3, 2).max(1), "shape": torch.Size([7, 8])}
        first, second = split(batch, 2)
        assert listed(first) == {"best": ([1.0, 3.0], [1, 1]), "shape": torch.Size([7, 8])}
        assert listed(second) == {"best": ([5.0], [1]), "shape": torch.Size([7, 8])}
        assert type(first["best"]) is type(second["best"]) is torch.return_types.max

    def test_host_tensors(self):
        """A HostTensor with axes is split along the dimension that comes first for the user."""
        memory = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
        first, second = split([HostTensor(memory, axes=(2, 0, 1), pinned=True), HostTensor(np.array(7))], 2)
        assert (first[0].axes, first[0].pinned) == ((2, 0, 1), True)
        assert second[0].memory.tolist() == memory[:, :, 2:].tolist()
        assert second[1].memory.tolist() == 7

    def test_without_tensors_the_batch_is_repeated(self):
        """A batch without tensors is repeated in every part."""
        assert split(["a", "b"], 2) == [["a", "b"], ["a", "b"]]

    def test_different_lengths_are_refused(self):
        """Tensors that differ in size along dimension 0 are an error."""
        with pytest.raises(ValueError, match=r"first has 4 rows; found shape \[3\].*transform="):
            split([torch.zeros(4, 2), torch.zeros(3)], 2)


class TestResolve:
    def test_group(self):
        """A list or tuple resolves to a DeviceGroup, also with one device; other arguments to one backend."""
        group = resolve_devices(devices := two())
        assert isinstance(group, DeviceGroup)
        assert [each.given for each in group.backends] == devices
        assert group.name == "simulated:0, simulated:1"
        assert len(resolve_devices((devices[0],)).backends) == 1
        assert resolve_devices(devices[0]).given is devices[0]
        assert resolve_devices("cpu") is None

    def test_host(self):
        """A list of "cpu" is a group with one CpuBackend per entry, for trying things out."""
        assert [type(backend) for backend in resolve_devices(["cpu", "cpu"]).backends] == [CpuBackend] * 2

    @pytest.mark.parametrize(
        ("given", "error", "match"),
        [
            ([], ValueError, "needs at least one"),
            ([None], TypeError, "a list cannot contain None"),
            (["cpu", SimulatedDevice()], ValueError, "leave 'cpu' out"),
            ([SimulatedDevice(), CpuBackend()], ValueError, "of one kind"),
            ([["cpu"]], TypeError, "expected one device"),
        ],
    )
    def test_refused(self, given, error, match):
        """Invalid lists are refused with a message that says what is allowed."""
        with pytest.raises(error, match=match):
            resolve_devices(given)

    def test_twice(self, monkeypatch):
        """The same device twice is refused."""
        device = SimulatedDevice(index=3)
        with pytest.raises(ValueError, match="simulated:3 is listed twice"):
            resolve_devices([device, device])
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert resolve_devices(["cuda:0", 1]).name == "cuda:0, cuda:1"
        with pytest.raises(ValueError, match="cuda:1 is listed twice"):
            resolve_devices([1, "cuda:0", "cuda:1"])


class TestFeeder:
    @pytest.mark.parametrize("device", [["cpu", "cpu"], two()])
    def test_parts(self, device):
        """A batch is a tuple of parts with the batch's structure; parts of the last batch may be empty."""
        x = torch.arange(9.0)
        feeder = aiofeed.Feeder(
            TensorDataset(x, x * 2), batch_size=4, device=device, transform=lambda b: [b[0] + 1, b[1]]
        )
        with feeder:
            found = list(feeder)
        assert [type(batch) for batch in found] == [tuple] * 3
        assert listed(found[0]) == ([[1, 2], [0, 2]], [[3, 4], [4, 6]])
        assert listed(found[2]) == ([[9], [16]], [[], []])
        assert feeder.statistics().samples == 9
        assert len(feeder) == 3

    def test_parts_share_no_memory(self):
        """Parts in host memory do not change with later batches or with other parts."""
        x = torch.arange(40_000.0).view(40, 1000)
        with aiofeed.Feeder(TensorDataset(x), batch_size=4, device=["cpu", "cpu"]) as feeder:
            kept = list(feeder)
            kept[0][0][0].zero_()
            for number, (first, second) in enumerate(kept[1:], start=1):
                assert torch.equal(torch.cat([first[0], second[0]]), x[number * 4 : number * 4 + 4])

    def test_images(self, jpeg_folder):
        """Parts of images that are decoded in place are in channels_last memory, like whole batches."""
        source = aiofeed.ImageFolder(jpeg_folder)
        options = {"decode": aiofeed.DecodeImage(32), "batch_size": 6, "shuffle": True}
        with aiofeed.Feeder(source, **options) as one, aiofeed.Feeder(source, device=two(), **options) as several:
            for (images, labels), parts in zip(one, several, strict=True):
                assert torch.equal(torch.cat([part[0].cpu() for part in parts]), images)
                assert torch.equal(torch.cat([part[1].cpu() for part in parts]), labels)
                assert all(part[0].is_contiguous(memory_format=torch.channels_last) for part in parts)

    @pytest.mark.parametrize("copy_fails_at", [1, 3])
    def test_errors_name_the_device(self, copy_fails_at):
        """A failed copy names its device, and the feeder can be iterated again."""
        devices = [SimulatedDevice(), SimulatedDevice(copy_fails_at=copy_fails_at, index=1)]
        with aiofeed.Feeder(TensorDataset(torch.arange(12.0)), batch_size=4, device=devices) as feeder:
            with pytest.raises(aiofeed.errors.DeviceCopyError, match="to simulated:1 failed"):
                list(feeder)
            assert len(list(feeder)) == 3

    def test_a_failing_transform_names_the_device(self):
        """An error of transform names the device of the part."""
        seen = []

        def transform(batch):
            seen.append(batch)
            return batch if len(seen) % 2 else 1 / 0

        feeder = aiofeed.Feeder(TensorDataset(torch.arange(8.0)), batch_size=4, device=two(), transform=transform)
        with feeder, pytest.raises(aiofeed.errors.DeviceCopyError, match="ZeroDivisionError on simulated:1"):
            list(feeder)

    def test_batches_that_cannot_be_split(self):
        """A batch whose tensors differ in length is an error that names the devices."""

        def collate(samples):
            return torch.stack([sample[0] for sample in samples]), torch.zeros(3)

        feeder = aiofeed.Feeder(
            TensorDataset(torch.arange(8.0)), batch_size=4, device=["cpu", "cpu"], collate_fn=collate
        )
        with (
            feeder,
            pytest.raises(aiofeed.errors.DeviceCopyError, match=r"for cpu, cpu cannot be split.*found shape \[3\]"),
        ):
            list(feeder)

    async def test_async(self):
        """``async for`` gives the same parts and can be left early."""
        x = torch.arange(100.0)
        async with aiofeed.Feeder(TensorDataset(x), batch_size=10, device=two()) as feeder:
            async for first, second in feeder:
                assert torch.cat([first[0].cpu(), second[0].cpu()]).tolist() == list(range(10))
                break

    def test_pickle(self):
        """A feeder for several devices can be pickled."""
        feeder = pickle.loads(
            pickle.dumps(aiofeed.Feeder(TensorDataset(torch.arange(4.0)), batch_size=4, device=["cpu"]))
        )
        with feeder:
            assert listed(list(feeder)) == [([[0, 1, 2, 3]],)]


class TestPrefetch:
    def test_parts(self):
        """``prefetch`` splits batches like a feeder."""
        batches = [{"x": torch.arange(5) + number, "keys": list("abcde")} for number in range(3)]
        found = [
            listed(batch)
            for batch in aiofeed.prefetch(batches, device=two(), transform=lambda b: b | {"two": b["x"] * 2})
        ]
        assert found[1] == (
            {"x": [1, 2, 3], "keys": ["a", "b", "c"], "two": [2, 4, 6]},
            {"x": [4, 5], "keys": ["d", "e"], "two": [8, 10]},
        )

    async def test_async_batches(self):
        """``prefetch`` splits the batches of an async iterable, too."""

        async def batches():
            for number in range(3):
                yield torch.full((3,), number)

        found = [listed(batch) async for batch in aiofeed.prefetch(batches(), device=["cpu", "cpu"])]
        assert found == [([number] * 2, [number]) for number in range(3)]


class TestScatter:
    def test_parts(self):
        """``scatter`` returns the parts of an existing batch on the devices."""
        devices = two("late")
        batch = [torch.arange(5), {"keys": list("abcde")}]
        assert listed(aiofeed.scatter(batch, devices)) == (
            [[0, 1, 2], {"keys": ["a", "b", "c"]}],
            [[3, 4], {"keys": ["d", "e"]}],
        )
        assert [device.copies for device in devices] == [1, 1]

    def test_host_memory_may_be_written_at_once(self):
        """After ``scatter`` the batch may be overwritten without changing the parts."""
        batch = torch.arange(6)
        parts = aiofeed.scatter(batch, two("late"))
        batch.zero_()
        assert listed(parts) == ([0, 1, 2], [3, 4, 5])

    def test_host(self):
        """Parts in host memory are copies."""
        batch = torch.arange(4)
        first, second = aiofeed.scatter(batch, ["cpu", "cpu"])
        batch.zero_()
        assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])

    def test_a_batch_on_a_device(self):
        """A batch that is on the device already is split there, after the work that computes it."""
        [device] = devices = [SimulatedDevice(latency="late")]
        there = device.copy(host := torch.arange(4)) * 2
        [part] = aiofeed.scatter(there, devices)
        assert part.tolist() == [0, 2, 4, 6]
        assert device.copies == 1
        del host

    @pytest.mark.parametrize("devices", ["cuda", None, SimulatedDevice()])
    def test_wrong_devices(self, devices):
        """``scatter`` refuses anything but a list of devices."""
        with pytest.raises(TypeError, match="a list of devices"):
            aiofeed.scatter(torch.ones(2), devices)


class TestCopier:
    def test_host_memory_waits_for_every_device(self):
        """``copied`` is complete when every device has read its part."""
        devices = two("late")
        copier = copier_for(resolve_devices(devices))
        pending = copier.issue(source := torch.arange(4))
        first, second = pending.batch
        first.copied.synchronize()
        assert not pending.copied.query() or second.copied.query()
        pending.copied.synchronize()
        assert first.copied.done
        assert second.copied.done
        del source

    def test_host_memory_is_free_when_an_error_is_raised(self):
        """When an error is raised, the copies of the parts before the failed one have run."""
        devices = [SimulatedDevice(latency="late"), SimulatedDevice(copy_fails_at=1, index=1)]
        with pytest.raises(aiofeed.errors.DeviceCopyError):
            copier_for(resolve_devices(devices)).issue(torch.ones(4))
        assert devices[0].queued <= 1  # the poisoning of dropped memory
