"""The CPU as a device: what several devices and fixed addresses are made of where there is no accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class _Done:
    """An event that is complete: nothing is ever queued on the host."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class HostBackend:
    """A device backend of the host: copies are made at once, there are no streams, and nothing is page-locked."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def enter_thread(self) -> None:
        """Nothing to do."""

    def side_stream(self) -> None:
        """``None``, as every stream here."""
        return None

    def current_stream(self) -> None:
        """``None``."""
        return None

    @contextmanager
    def on(self, stream: object, /) -> Iterator[None]:
        """Nothing changes."""
        yield

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """A copy, always: the memory it is read from is used again. Strides are kept where dense."""
        return tensor.clone()

    def record(self, stream: object, /) -> _Done:
        """An event that is complete."""
        return _Done()

    def wait(self, stream: object, event: object, /) -> None:
        """Nothing to wait for."""

    def hold(self, tensor: torch.Tensor, stream: object, /) -> None:
        """Nothing to do: the host frees memory when nobody uses it."""

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Pageable memory, which is as good where nothing is copied by itself."""
        import numpy as np

        return np.empty(nbytes, np.uint8)

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """False."""
        return False
