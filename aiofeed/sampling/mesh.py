"""The place of a rank in a ``torch.distributed.device_mesh.DeviceMesh``: its data-parallel rank, its part of sequences.

Ranks that differ in other dimensions only (tensor, context, pipeline parallelism) get the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiofeed.core.pytree import leaves, map_leaves
from aiofeed.sampling.feed_order import check_shard

MODEL_PARALLEL = {"cp", "sp", "tp", "pp", "ep"}


@dataclass(frozen=True)
class MeshPlace:
    """The place of this process in a mesh.

    Args:
        rank, size: In the chosen dimensions, counted row by row, as torch flattens them.
        replica, replicas: In the other dimensions.
    """

    rank: int
    size: int
    replica: int = 0
    replicas: int = 1


def is_mesh(value: object) -> bool:
    """Whether ``value`` is a ``DeviceMesh``."""
    return hasattr(value, "mesh_dim_names") and hasattr(value, "get_coordinate")


def place_in_mesh(argument: str, mesh: Any, names: str | Sequence[str] | None = None) -> MeshPlace:
    """The place of this process in the named dimensions of a mesh.

    Args:
        argument: The argument of ``Feeder`` for messages.
        mesh: A ``DeviceMesh``.
        names: ``None`` for the data-parallel dimensions, whose names begin with "dp" or "data".

    Raises:
        ValueError: No dimension is data-parallel, one has another name, or the mesh is without this process.
    """
    dims = mesh.mesh_dim_names or tuple("" for _ in mesh.shape)
    known = f"the dimensions of the mesh are {dict(zip(dims, mesh.shape, strict=True))}"
    if names is None:
        names = [name for name in dims if name.startswith(("dp", "data")) and not MODEL_PARALLEL & {*name.split("_")}]
        if not names:
            raise ValueError(
                f"{argument}: no dimension has a name that begins with 'dp' or 'data' (init_device_mesh takes "
                f"mesh_dim_names=): name those of data parallelism, as in {argument}=('replicate', mesh); {known}"
            )
    chosen = list(names) if isinstance(names, tuple | list) else [names]
    unknown = [name for name in chosen if not name or name not in dims]
    if unknown or not chosen:
        raise ValueError(f"{argument} names {unknown}, and {known}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{argument}: rank {mesh.get_rank()} of this process is not in the mesh; {known}")
    places = {True: (0, 1), False: (0, 1)}
    for name, size, at in zip(dims, mesh.shape, coordinate, strict=True):
        rank, ranks = places[name in chosen]
        places[name in chosen] = rank * size + at, ranks * size
    return MeshPlace(*places[True], *places[False])


def find_place(argument: str, value: Any) -> MeshPlace | None:
    """The place that a mesh or ``(names, mesh)`` gives; ``None`` for another value."""
    if is_mesh(value):
        return place_in_mesh(argument, value)
    if isinstance(value, tuple) and len(value) == 2 and is_mesh(value[1]):
        return place_in_mesh(argument, value[1], value[0])
    return None


@dataclass(frozen=True)
class SequencePart:
    """A ``transform`` that cuts the sequences of a batch after another one, and returns the part of this rank.

    Args:
        rank, size: This rank, and the number of parts.
        zigzag: Cut into ``2 * size`` pieces, and give rank r pieces r and ``2 * size - 1 - r``: under a causal mask all
            ranks then attend to equally many tokens. By default parts are contiguous.
        transform: Called with the batch before.
    """

    rank: int
    size: int
    zigzag: bool = False
    transform: Callable[[Any], Any] | None = None

    def __call__(self, batch: Any) -> Any:
        """The batch with the part of each tensor [N, T, ...]; tensors of fewer dimensions stay as they are.

        Raises:
            ValueError: Tensors differ in T, or T cannot be cut into equal parts.
        """
        if self.transform is not None:
            batch = self.transform(batch)
        lengths = {tensor.shape[1] for tensor in leaves(batch) if getattr(tensor, "ndim", 0) > 1}
        pieces = self.size * (1 + self.zigzag)
        if len(lengths) > 1 or any(length % pieces for length in lengths):
            raise ValueError(
                f"split_sequence= cuts dimension 1 of all tensors [N, T, ...] into {pieces} equal parts, and this "
                f"batch has the lengths {sorted(lengths)}: pad to a multiple of {pieces}, as with "
                f"pad_collate(multiple_of={pieces}), or cut in transform="
            )
        return map_leaves(self._part, batch)

    def _part(self, value: Any) -> Any:
        if getattr(value, "ndim", 0) < 2:
            return value
        import torch

        pieces = value.chunk(self.size * (1 + self.zigzag), 1)
        return torch.cat([pieces[self.rank], pieces[-1 - self.rank]][: 1 + self.zigzag], 1)


def sequence_part(value: Any, transform: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The transform for ``split_sequence=value`` after another one.

    Raises:
        TypeError, ValueError: The value is not (rank, size) or (name, mesh), with "zigzag" as a third item or without.
    """
    if value is None:
        return transform
    kind = value[2:] if isinstance(value, tuple) else None
    place = find_place("split_sequence", value[:2]) if kind in ((), ("zigzag",)) and not is_mesh(value) else None
    if place is None:
        try:
            place = MeshPlace(*check_shard(value[:2] if kind == ("zigzag",) else value))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"split_sequence must be ('cp', mesh) or (rank, size), with 'zigzag' as a third item or without, got "
                f"{value!r}"
            ) from None
    return SequencePart(place.rank, place.size, bool(kind), transform)
