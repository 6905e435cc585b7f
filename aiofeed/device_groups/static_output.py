"""Fixed tensors on the device into which all batches are copied, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.kernel.runtime.tensors import is_tensor

if TYPE_CHECKING:
    import torch

    from aiofeed.kernel.core.faces import BaseDevice, Stream
    from aiofeed.kernel.feeder.arguments import FeederConfig


def with_static_outputs(config: FeederConfig, shapes: int) -> FeederConfig:
    """Return a configuration with new static outputs for so many shapes of batches."""
    backend = config.backend or CpuBackend()
    outputs = tuple([StaticOutput(each, shapes) for each in backend.backends])
    return replace(config, backend=backend, static_outputs=outputs)


class StaticOutput:
    """An ``output`` of a ``Copier`` that copies all batches of equal shapes into the same tensors, for CUDA graphs.

    A captured graph reads from fixed addresses. Batches are copied to the device ahead, into memory of their own;
    ``next`` then copies the batch into the fixed tensors, on the consumer's stream. That costs one copy within device
    memory per batch. A ring of buffers would save that copy but need one captured graph per buffer.

    The tensors are written on the stream of this ``deliver``, after all work queued so far on the stream of the
    previous ``deliver``, which uses the previous batch. They are created with the first batch of their shapes.

    Args:
        shapes: Most kinds of batches, which differ in structure, shapes or dtypes: one per bucket of ``Buckets``.
    """

    def __init__(self, backend: BaseDevice, shapes: int = 1) -> None:
        self._backend = backend
        self.shapes = shapes
        # The tensors of each kind: by its text, and shapes and dtypes, because a container may have its own repr.
        self._tensors: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._stream: Stream = None

    def __call__(self, batch: Any, stream: Stream) -> Any:
        """Return the batch in the fixed tensors; it is valid until the next call. Never blocks.

        Raises:
            DeviceCopyError: It is of another kind than the batches before, which were of as many as there may be.
        """
        import torch

        found: list[torch.Tensor] = []

        def describe(leaf: Any) -> str:
            if not is_tensor(leaf):
                return "..."
            found.append(leaf)
            return f"{leaf.dtype}{list(leaf.shape)}"

        layout = repr(map_leaves(describe, batch))
        # The tensors must not be inference tensors, because later batches may be written outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            tensors = self._tensors_for(layout, found)
            if self._stream is not None:
                self._wait_for_last_use(stream)
            for tensor, leaf in zip(tensors, found, strict=True):
                tensor.copy_(leaf)
                self._backend.record_stream(tensor, stream)
        self._stream = stream
        remaining: Iterator[Any] = iter(tensors)
        return map_leaves(lambda leaf: next(remaining) if is_tensor(leaf) else leaf, batch)

    def _wait_for_last_use(self, stream: Stream) -> None:
        """Make a stream wait for the work that uses the previous batch."""
        self._backend.wait(stream, self._backend.record(self._stream))

    def _tensors_for(self, layout: str, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        import torch

        kind = layout, *[(leaf.shape, leaf.dtype) for leaf in found]
        if kind not in self._tensors:
            if any(leaf.layout is not torch.strided for leaf in found):
                raise DeviceCopyError(f"static_batches=True takes dense tensors; on {self._backend.name}: {layout}")
            if len(self._tensors) == self.shapes:
                raise self._too_many_kinds(layout)
            self._tensors[kind] = [torch.empty_like(leaf, requires_grad=False) for leaf in found]
        return self._tensors[kind]

    def _too_many_kinds(self, layout: str) -> DeviceCopyError:
        first, *others = [text for text, *_ in self._tensors]
        if not others:
            return DeviceCopyError(
                f"static_batches=True needs batches that are all alike; the first on {self._backend.name} was {first}, "
                f"this one is {layout}"
            )
        return DeviceCopyError(
            f"static_batches=True with Buckets needs batches that are alike within each of {self.shapes} buckets; "
            f"those on {self._backend.name} were {', '.join([first, *others])}, this one is {layout}: pad all batches "
            f"of a bucket to one length, for example with pad_collate(multiple_of=...)"
        )
