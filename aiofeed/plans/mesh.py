"""The place of a rank in a ``torch.distributed.device_mesh.DeviceMesh``: its data-parallel rank, its part of sequences.

Ranks that differ in other dimensions only (tensor, context, pipeline parallelism) get the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.sampling.feed_order import check_shard

MODEL_PARALLEL = {"cp", "sp", "tp", "pp", "ep"}


def rank_in_mesh(argument: str, value: Any) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The rank of this process and the number of ranks in the chosen dimensions of a mesh, and those in the others.

    Counted row by row, as torch flattens dimensions.

    Args:
        argument: The argument of ``Feeder`` for messages.
        value: A ``DeviceMesh``, of which the dimensions count whose names begin with "dp" or "data", or (names, mesh).
            For any other value the result is ``None``.

    Raises:
        ValueError: No dimension is data-parallel, one has another name, or the mesh is without this process.
    """
    names, mesh = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    if not (hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_coordinate")):
        return None
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
    return places[True], places[False]


def sequence_part(value: Any, transform: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Return the transform for ``split_sequence=value`` after another one.

    Raises:
        TypeError, ValueError: The value is not (rank, size) or (name, mesh), with "zigzag" as a third item or without.
    """
    if value is None:
        return transform
    zigzag = isinstance(value, tuple) and value[2:] == ("zigzag",)
    part = value[:2] if zigzag else value
    place = rank_in_mesh("split_sequence", part) if isinstance(part, tuple) else None
    try:
        rank, size = check_shard(part) if place is None else place[0]
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"split_sequence must be ('cp', mesh) or (rank, size), with 'zigzag' as a third item or without, got "
            f"{value!r}"
        ) from None
    return partial(cut_sequences, rank, size, zigzag, transform)


def cut_sequences(rank: int, size: int, zigzag: bool, transform: Callable[[Any], Any] | None, batch: Any) -> Any:
    """Call ``transform``, and cut each tensor [N, T, ...] to the part of a rank; those of fewer dimensions stay whole.

    Parts are contiguous. With ``zigzag`` there are ``2 * size`` pieces, and rank r gets pieces r and
    ``2 * size - 1 - r``: under a causal mask all ranks then attend to equally many tokens.

    Raises:
        ValueError: Tensors differ in T, or T cannot be cut into equal parts.
    """
    batch = batch if transform is None else transform(batch)
    lengths = {tensor.shape[1] for tensor in leaves(batch) if getattr(tensor, "ndim", 0) > 1}
    pieces = size * (1 + zigzag)
    if len(lengths) > 1 or any(length % pieces for length in lengths):
        raise ValueError(
            f"split_sequence= cuts dimension 1 of all tensors [N, T, ...] into {pieces} equal parts, and this batch "
            f"has the lengths {sorted(lengths)}: pad to a multiple of {pieces}, as pad_collate(multiple_of=) does"
        )

    def part(value: Any) -> Any:
        if getattr(value, "ndim", 0) < 2:
            return value
        import torch

        found = value.chunk(pieces, 1)
        return torch.cat([found[rank], found[-1 - rank]][: 1 + zigzag], 1)

    return map_leaves(part, batch)
