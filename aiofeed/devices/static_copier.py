"""Batches at fixed addresses, for CUDA graphs: every batch is handed out in the same tensors.

A captured graph reads from one address. So there is one set of tensors per device, filled at each ``next`` from the
look-ahead, whose batches live in memory of their own as ever. That costs one copy within the device per batch, on the
consumer's stream: its bytes read and written once, at the speed of the device's own memory. The other way, a ring of
buffers whose turn it is, would save it and ask for one captured graph per buffer.

What keeps the bytes right: the memory is written on the consumer's stream of this ``next``, after what was queued by
now on that of the one before, which is where the last batch is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.pytree import leaves, map_leaves
from aiofeed.devices.copier import Copier, PendingCopy, is_tensor
from aiofeed.devices.resolve import DeviceGroup

if TYPE_CHECKING:
    import torch

    from aiofeed.core.failure_policy import FailurePolicy
    from aiofeed.devices.backend import DeviceBackend, Stream


class StaticBatch:
    """The tensors of one device that every batch is handed out in. Outlives the threads: addresses stay."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] | None = None
        self.layout = ""
        self.used_on: Stream = None


class StaticCopier(Copier):
    """A ``Copier`` that hands every batch out in the same tensors.

    Args:
        backend: the device.
        transform: called with each batch on the device, on the side stream.
        static: the tensors; made at the first batch.
    """

    def __init__(
        self, backend: DeviceBackend, transform: Callable[[Any], Any] | None = None, static: StaticBatch | None = None
    ) -> None:
        super().__init__(backend, transform)
        self.static = static or StaticBatch()

    def deliver(self, in_flight: PendingCopy) -> Any:
        """The batch, in the tensors of all batches; valid until the next call. Never blocks.

        Raises:
            DeviceCopyError: its structure, a shape or a dtype is another than the first batch's.
        """
        import torch

        static, stream = self.static, self.backend.current_stream()
        arrived = super().deliver(in_flight)
        # Not an inference tensor, wherever the first is asked for: it is written again elsewhere.
        with torch.inference_mode(False), torch.no_grad():
            tensors = self._tensors(arrived)
            if static.tensors is not None and static.used_on is not None:
                self._guard(stream)
            for tensor, leaf in zip(tensors, (leaf for leaf in leaves(arrived) if is_tensor(leaf)), strict=True):
                tensor.copy_(leaf)
                self.backend.record_stream(tensor, stream)
        static.tensors, static.used_on = tensors, stream
        remaining: Iterator[Any] = iter(tensors)
        return map_leaves(lambda leaf: next(remaining) if is_tensor(leaf) else leaf, arrived)

    def _guard(self, stream: Stream) -> None:
        """Let a stream wait for what the last batch is used for."""
        self.backend.wait(stream, self.backend.record(self.static.used_on))

    def _tensors(self, arrived: Any) -> list[torch.Tensor]:
        import torch

        static, layout = self.static, repr(map_leaves(_Described, arrived))
        found = [leaf for leaf in leaves(arrived) if is_tensor(leaf)]
        if static.tensors is None:
            if any(leaf.layout is not torch.strided for leaf in found):
                raise DeviceCopyError(f"static_batches=True takes dense tensors; on {self.backend.name}: {layout}")
            static.layout = layout
            return [torch.empty_like(leaf, requires_grad=False) for leaf in found]
        # Not by what is printed alone: a container may print as it likes, and copy_ would broadcast.
        alike = [(leaf.shape, leaf.dtype) for leaf in found] == [(each.shape, each.dtype) for each in static.tensors]
        if layout != static.layout or not alike:
            raise DeviceCopyError(
                f"static_batches=True needs batches that are all alike; the first on {self.backend.name} was "
                f"{static.layout}, this one is {layout}"
            )
        return static.tensors


class _Described:
    """A leaf as errors quote it: dtype and shape of a tensor."""

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __repr__(self) -> str:
        leaf = self._leaf
        return f"{leaf.dtype}{list(leaf.shape)}" if is_tensor(leaf) else "..."


def statics_for(backend: DeviceBackend | DeviceGroup) -> tuple[StaticBatch, ...]:
    """The tensors of a feeder, per device; nothing is allocated yet."""
    return tuple(StaticBatch() for _ in (backend.backends if isinstance(backend, DeviceGroup) else (backend,)))


def check_static(*, drop_last: bool, length: int | None, batch_size: int, policy: FailurePolicy) -> None:
    """Whether batches can all be of one size.

    Args:
        drop_last: as the feeder got it.
        length: of the source; ``None`` where a sampler decides.
        batch_size: samples per batch.
        policy: what samples that fail do.

    Raises:
        ValueError: they cannot.
    """
    if not drop_last and (length is None or length % batch_size):
        of = "a sampler's samples" if length is None else f"{length} samples"
        raise ValueError(
            f"static_batches=True needs batches of one size, and the last of {of} by {batch_size} may be smaller: "
            f"pass drop_last=True"
        )
    if policy.action == "skip":
        raise ValueError(
            "static_batches=True needs batches of one size, and on_error='skip' makes them smaller: pass "
            "on_error='replace', or 'raise'"
        )
