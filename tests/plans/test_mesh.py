"""Ranks of a `DeviceMesh`: the same batches for ranks of one data-parallel group, and parts of sequences."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import aiofeed
from aiofeed import Feeder
from aiofeed.plans.mesh import rank_in_mesh, sequence_part
from tests.support.simulated_device import SimulatedDevice

NAMES = ("dp", "cp", "tp")


class Mesh:
    """What is used of a `DeviceMesh`, for one rank of a mesh of any shape."""

    def __init__(self, rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        self.mesh_dim_names, self.shape = names, shape
        self._rank = rank

    def get_coordinate(self) -> list[int] | None:
        places = list(itertools.product(*map(range, self.shape)))
        return list(places[self._rank]) if self._rank < len(places) else None

    def get_rank(self) -> int:
        return self._rank


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """`as_rank(rank, world_size)` makes this process that rank of a group without communication."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

    def enter(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world_size)

    yield enter
    if dist.is_initialized():
        dist.destroy_process_group()


def numbers(shard: Any, n: int = 40, **options: Any) -> Feeder[Any]:
    return Feeder(list(torch.arange(n)), **{"batch_size": 2, "shuffle": True, "shard": shard, **options})


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("names", [NAMES, ("tp", "dp", "cp"), ("cp", "tp", "dp")])
def test_ranks_of_one_group_get_the_same_batches(names: tuple[str, ...]) -> None:
    """On 8 x 4 x 2 ranks, in any layout, a rank gets the batches of its data-parallel rank."""
    shape = tuple({"dp": 8, "cp": 4, "tp": 2}[name] for name in names)
    wanted = [values(numbers((rank, 8))) for rank in range(8)]
    for rank in range(64):
        mesh = Mesh(rank, shape, names)
        place = dict(zip(names, mesh.get_coordinate() or (), strict=True))["dp"]
        with numbers(mesh) as feeder:
            assert values(feeder) == wanted[place]
    assert sorted(sum(sum(wanted, []), [])) == list(range(40))


def test_a_mesh_of_torch_has_these_places(as_rank: Callable[[int, int], None]) -> None:
    """`DeviceMesh` gives data-parallel ranks on 8 x 4 x 2, as the simulated mesh does; submeshes do, too."""
    for rank in (0, 5, 17, 42, 63):
        as_rank(rank, 64)
        mesh = init_device_mesh("cpu", (8, 4, 2), mesh_dim_names=NAMES)
        simulated = Mesh(rank, (8, 4, 2), NAMES)
        for names in ("dp", ("dp", "cp"), "tp"):
            assert rank_in_mesh("shard", (names, mesh)) == rank_in_mesh("shard", (names, simulated))
        assert rank_in_mesh("shard", mesh) == rank_in_mesh("shard", simulated) == ((rank // 8, 8), (rank % 8, 8))
        assert rank_in_mesh("shard", mesh["dp"]) == ((rank // 8, 8), (0, 1))
        assert numbers(mesh).state_dict()["world_size"] == 8


def test_several_dimensions_are_data_parallel() -> None:
    """Of replicate x shard x cp x tp the first two count, by their names or by the names given, in the mesh's order."""
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    for rank in range(2 * 3 * 2 * 2):
        mesh = Mesh(rank, (2, 3, 2, 2), names)
        assert rank_in_mesh("shard", mesh) == ((rank // 4, 6), (rank % 4, 4))
        assert rank_in_mesh("shard", (("dp_shard", "dp_replicate"), mesh)) == rank_in_mesh("shard", mesh)
    assert rank_in_mesh("shard", ("dp_shard", Mesh(23, (2, 3, 2, 2), names))) == ((2, 3), (7, 8))


@pytest.mark.parametrize(
    ("mesh", "names", "message"),
    [
        (Mesh(0, (2, 2), ("cp", "tp")), None, "are {'cp': 2, 'tp': 2}"),
        (Mesh(0, (2, 2), ("dp_shard_cp", "tp")), None, "begins with 'dp' or 'data'.*are {'dp_shard_cp': 2, 'tp': 2}"),
        (Mesh(0, (4,), None), None, r"mesh_dim_names="),
        (Mesh(0, (2, 2), ("dp", "tp")), "pp", r"names \['pp'\], and the dimensions of the mesh are {'dp': 2, 'tp': 2}"),
        (Mesh(0, (2, 2), ("dp", "tp")), (), r"names \[\]"),
        (Mesh(7, (2, 2), ("dp", "tp")), None, "rank 7 of this process is not in the mesh"),
    ],
)
def test_a_mesh_that_says_too_little_is_refused(mesh: Mesh, names: Any, message: str) -> None:
    """The error names the dimensions of the mesh."""
    with pytest.raises(ValueError, match=message):
        numbers(mesh if names is None else (names, mesh))


@pytest.mark.parametrize("shard", [("dp", 2), ("dp", Mesh(0, (2,), ("dp",)), 1), "dp"])
def test_other_values_are_refused(shard: Any) -> None:
    """The error lists what `shard=` takes."""
    with pytest.raises(TypeError, match=r"shard must be \(rank, world_size\), a DeviceMesh, \(name, mesh\)"):
        numbers(shard)


@pytest.mark.parametrize("in_order", [False, "samples"])
def test_batches_out_of_order_need_a_group_of_one(in_order: Any) -> None:
    """in_order=False is refused if several ranks must get the same batches, and works in a data-parallel mesh."""
    with pytest.raises(ValueError, match=r"in_order=.* is not possible with a mesh with other dimensions"):
        numbers(Mesh(0, (2, 2), ("dp", "tp")), in_order=in_order)
    with numbers(Mesh(1, (2, 2), ("dp_replicate", "dp_shard")), in_order=in_order) as feeder:
        assert len(values(feeder)) == 5


@pytest.mark.parametrize("other", [((2, 2, 4), ("dp", "cp", "tp")), ((4, 3), ("tp", "data")), ((5,), ("dp",))])
def test_a_resume_on_another_mesh_is_exact(other: tuple[tuple[int, ...], tuple[str, ...]]) -> None:
    """A state has data-parallel positions only: on any other mesh the rest of the epoch comes, each sample once."""
    shape, names = other
    states, seen = [], []
    for rank in range(16):
        with numbers(Mesh(rank, (4, 2, 2), NAMES), n=76) as feeder:
            iterator = iter(feeder)
            batches = [next(iterator), next(iterator)]
            states.append(feeder.state_dict())
            seen += sum(values(batches), []) if rank % 4 == 0 else []
    assert all(state == states[0] for state in states)
    rest: dict[int, list[list[int]]] = {}
    for rank in range(len(list(itertools.product(*map(range, shape))))):
        mesh = Mesh(rank, shape, names)
        with numbers(mesh, n=76) as feeder:
            feeder.load_state_dict(states[0])
            got = values(feeder)
        place = rank_in_mesh("shard", mesh)
        assert place is not None
        assert rest.setdefault(place[0][0], got) == got
    later = sum(sum(rest.values(), []), [])
    assert sorted(later + seen) == list(range(76))


def test_a_feeder_of_a_mesh_is_pickled_without_it() -> None:
    """A copy for another process has the place of the mesh, not the mesh."""
    feeder = numbers(Mesh(3, (2, 2), ("dp", "cp")), split_sequence=("cp", Mesh(3, (2, 2), ("dp", "cp"))))
    assert b"Mesh" not in pickle.dumps(feeder)
    assert pickle.loads(pickle.dumps(feeder)).state_dict() == feeder.state_dict()


def test_one_of_equal_ranks_shows_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the ranks that get the same batches, the first shows a progress bar."""
    monkeypatch.setattr("aiofeed.reports.progress.shows_progress", lambda: True)
    shown = []
    for rank in range(4):
        with numbers(Mesh(rank, (2, 2), ("dp", "tp"))) as feeder:
            list(feeder.progress())
        shown.append(bool(capsys.readouterr().err))
    assert shown == [True, False, False, False]


# --- split_sequence= ---


def rows(count: int = 4, length: int = 8) -> list[dict[str, Any]]:
    """Samples with the tokens 100 * i to 100 * i + length - 1, and a label."""
    return [{"tokens": 100 * index + torch.arange(length), "label": index} for index in range(count)]


def test_ranks_get_parts_of_sequences() -> None:
    """Parts are contiguous, equal and in order; tensors without a sequence are whole; transform= comes before."""
    parts = [
        next(iter(Feeder(rows(), batch_size=2, shard=None, split_sequence=(rank, 4), transform=lambda b: b | {"x": 1})))
        for rank in range(4)
    ]
    assert torch.equal(torch.cat([part["tokens"] for part in parts], 1), torch.stack([r["tokens"] for r in rows(2)]))
    assert all(part["label"].tolist() == [0, 1] and part["x"] == 1 for part in parts)
    assert all(part["tokens"].is_contiguous() for part in parts)


def test_zigzag_gives_each_rank_as_much_to_attend_to() -> None:
    """Rank r of R gets pieces r and 2R - 1 - r of 2R."""
    mesh = [Mesh(rank, (2, 2), ("dp", "cp")) for rank in range(2)]
    got = [
        next(iter(Feeder(rows(), batch_size=1, shard=each, split_sequence=("cp", each, "zigzag"))))["tokens"].tolist()  # type: ignore[arg-type]
        for each in mesh
    ]
    assert got == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    attended = [sum(place + 1 for place in tokens) for [tokens] in got]
    assert attended[0] == attended[1]


@pytest.mark.parametrize(
    "options",
    [
        {"device": SimulatedDevice()},
        {"engine": "process"},
        {"static_batches": True, "drop_last": True},
        {"cache": "host"},
    ],
    ids=["device", "process", "static", "cache"],
)
def test_parts_come_from_every_kind_of_feeder(options: dict[str, Any], forked_workers: None) -> None:
    """The parts are those of a plain feeder."""
    wanted = [batch["tokens"].tolist() for batch in Feeder(rows(), batch_size=2, shard=None, split_sequence=(1, 2))]
    with Feeder(rows(), batch_size=2, shard=None, split_sequence=(1, 2), **options) as feeder:
        assert [batch["tokens"].tolist() for batch in feeder] == wanted


def test_tensors_in_memory_are_cut() -> None:
    """Batches of `Tensors` are cut, and the data are not changed."""
    data = torch.arange(32).reshape(4, 8)
    with Feeder(aiofeed.Tensors(data), batch_size=2, shard=None, split_sequence=(1, 2)) as feeder:
        assert [batch.tolist() for [batch] in feeder] == [data[:2, 4:].tolist(), data[2:, 4:].tolist()]


@pytest.mark.parametrize(
    ("batch", "part", "lengths"),
    [
        ({"tokens": torch.zeros(2, 9)}, (0, 2), "9"),
        ([torch.zeros(2, 6)], (0, 2, "zigzag"), "6"),
        ([torch.zeros(2, 8), torch.zeros(2, 3, 4, 4)], (0, 1), "3, 8"),
    ],
)
def test_sequences_that_cannot_be_cut_are_refused(batch: Any, part: Any, lengths: str) -> None:
    """The error gives the lengths, and how to pad."""
    with pytest.raises(ValueError, match=rf"lengths \[{lengths}\]: pad to a multiple of"):
        transform = sequence_part(part, None)
        assert transform is not None
        transform(batch)


@pytest.mark.parametrize("value", [(2, 2), ("cp", 2), (0, 2, "ring"), "cp", (0,), Mesh(0, (2,), ("cp",))])
def test_other_parts_are_refused(value: Any) -> None:
    """The error says what `split_sequence=` takes."""
    with pytest.raises((TypeError, ValueError), match=r"split_sequence must be \('cp', mesh\) or \(rank, size\)"):
        numbers(None, split_sequence=value)


# --- four processes ---


def run_rank(rank: int, folder: str) -> None:
    """One of 2 x 2 ranks with gloo: it saves its batches, and after a resume on 4 x 1 ranks the rest."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    feeder = Feeder(rows(24), batch_size=2, shuffle=True, shard=mesh, split_sequence=("cp", mesh))
    iterator = iter(feeder)
    before = [next(iterator)["tokens"] for _ in range(2)]
    gathered = [torch.empty_like(before[0]) for _ in range(4)]
    dist.all_gather(gathered, before[0])
    state = [feeder.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(state)
    resumed = Feeder(
        rows(24), batch_size=1, shuffle=True, shard=init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp"))
    )
    resumed.load_state_dict(state[0] or {})
    after = [batch["tokens"] for batch in resumed]
    torch.save({"gathered": gathered, "before": before, "after": after}, f"{folder}/{rank}.pt")
    feeder.close()
    resumed.close()
    dist.barrier()
    os._exit(0)  # torch keeps gloo's threads, which may abort the exit of the interpreter


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_ranks_of_gloo_get_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 x 2 ranks each pair has one batch in two parts; the rest on 4 ranks has every other sample once."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    processes = [get_context("fork").Process(target=run_rank, args=(rank, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    results: list[Any] = [torch.load(io.BytesIO((tmp_path / f"{rank}.pt").read_bytes())) for rank in range(4)]
    for result in results:
        for first, second in ((0, 1), (2, 3)):
            whole = torch.cat([result["gathered"][first], result["gathered"][second]], 1)
            assert ((whole - whole[:, :1]) == torch.arange(8)).all()
    seen = [tokens[0] // 100 for rank in (0, 2) for batch in results[rank]["before"] for tokens in batch.tolist()]
    rest = [batch[0, 0].item() // 100 for result in results for batch in result["after"]]
    assert len(seen) == 8
    assert sorted(seen + rest) == list(range(24))
