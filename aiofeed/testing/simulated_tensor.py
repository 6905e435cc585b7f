"""Tensors of a simulated device: operations on them are queued on the calling thread's current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from aiofeed.testing.simulated_device import SimulatedDevice
    from aiofeed.testing.simulated_memory import BlockHandle


class SimulatedTensor(torch.Tensor):
    """A tensor in a simulated device's memory, created by ``SimulatedDevice.copy`` and by operations on such tensors.

    Operations return at once and run later, in stream order. Views share memory and its lifetime. Reading values
    (``item``, ``tolist``, ``numpy``, ``cpu``, ``to("cpu")``, ``print``, ``bool``, ``torch.equal``, a boolean mask)
    waits for the calling thread's current stream only. ``device`` is the CPU, so operations may mix simulated tensors
    with tensors and modules of the host.
    """

    simulated: SimulatedDevice
    raw: torch.Tensor
    handle: BlockHandle

    @staticmethod
    def __new__(cls, raw: torch.Tensor, handle: BlockHandle, simulated: SimulatedDevice) -> SimulatedTensor:
        """A tensor over the plain tensor ``raw``, whose memory is not reused while ``handle`` exists."""
        make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
        tensor = make(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=raw.device,
        )
        tensor.raw, tensor.handle, tensor.simulated = raw, handle, simulated
        return cast("SimulatedTensor", tensor)

    def record_stream(self, s: Any) -> None:
        """Call ``SimulatedDevice.record_stream``; torch's method accepts only torch's streams."""
        self.simulated.record_stream(self, s)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Redirect functions that read memory without the dispatcher; call all others unchanged."""
        if func in _host_reads and isinstance(args[0], SimulatedTensor):
            return _host_reads[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Queue the operation."""
        return _Operation(func, args, kwargs or {}).queue()


def _to_host(tensor: SimulatedTensor) -> torch.Tensor:
    tensor.simulated.synchronize_current()
    return tensor.raw.detach().clone()


def _to(tensor: SimulatedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # A torch.device may come from a simulated tensor and then means the simulated device; "cpu" means the host.
    if "cpu" in (args[:1] or (kwargs.get("device"),)):
        return _to_host(tensor).to(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(tensor, *args, **kwargs)


_host_reads: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cpu: lambda tensor, *args, **kwargs: _to_host(tensor),
    torch.Tensor.to: _to,
    torch.Tensor.numpy: lambda tensor, **kwargs: _to_host(tensor).numpy(),
    torch.Tensor.tolist: lambda tensor: _to_host(tensor).tolist(),
    torch.Tensor.__array__: lambda tensor, *args, **kwargs: np.asarray(_to_host(tensor).numpy(), *args, **kwargs),
    torch.Tensor.__repr__: lambda tensor, **kwargs: f"simulated {_to_host(tensor)!r}",
    torch.Tensor.__format__: lambda tensor, spec: format(_to_host(tensor), spec),
    torch.Tensor.data_ptr: lambda tensor: tensor.raw.data_ptr(),
}


class _Operation:
    """One call of torch's dispatcher with simulated tensors among its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.returns = func._schema.returns
        self.inputs = [tensor for tensor in _tensors((*args, *kwargs.values())) if isinstance(tensor, SimulatedTensor)]
        self.simulated = self.inputs[0].simulated
        if any(tensor.simulated is not self.simulated for tensor in self.inputs):
            raise RuntimeError(f"{func}: tensors of two simulated devices in one operation")
        self.written = [
            tensor
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors((args[position] if position < len(args) else kwargs.get(argument.name),))
        ]
        self.args = _map(_raw, args)
        self.kwargs = {name: _map(_raw, value) for name, value in kwargs.items()}
        self.call = functools.partial(func, *self.args, **self.kwargs)

    def queue(self) -> Any:
        if torch.Tag.inplace_view in self.func.tags:
            raise NotImplementedError(f"simulated tensors cannot change their shape in place ({self.func})")
        if any(value.alias_info is not None and not value.alias_info.is_write for value in self.returns):
            # Views do not access memory, so they are created at once.
            handle, simulated = self.inputs[0].handle, self.simulated
            return _map(lambda raw: SimulatedTensor(raw, handle, simulated), self.call())
        if any("Tensor" not in str(value.type) for value in self.returns):
            self.simulated.synchronize_current()  # a number for the host
            return self.call()
        if any(not isinstance(tensor, SimulatedTensor) for tensor in self.written):
            # Writes host memory (an optimizer's parameters, say), which the host may read without waiting.
            return self._run_now()
        try:
            like = self._shapes()
        except Exception:  # noqa: BLE001 - the shape depends on values, or the real call raises the same error
            return self._run_now()
        value, outputs = self._allocate(like)
        # The queued function refers to plain memory, not to simulated tensors: a kernel keeps no tensor alive.
        call, returns = self.call, self.returns
        self.simulated.enqueue(lambda: _fill(outputs, _new_tensors(returns, call())))
        return value

    def _run_now(self) -> Any:
        self.simulated.synchronize_current()
        result = self.call()
        value, outputs = self._allocate(result)
        computed = _new_tensors(self.returns, result)
        self.simulated.enqueue(lambda: _fill(outputs, computed))
        return value

    def _shapes(self) -> Any:
        """The result as tensors without memory."""
        if all(value.alias_info is not None for value in self.returns):
            return None if len(self.returns) == 1 else (None,) * len(self.returns)
        key = (self.func, _signature(self.args), _signature(tuple(self.kwargs.items())))
        if key not in _shapes:
            kwargs = {name: _map(_meta, value) for name, value in self.kwargs.items()}
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            if len(_shapes) > 10_000:
                _shapes.clear()
            _shapes[key] = self.func(*_map(_meta, self.args), **kwargs)
        return _shapes[key]

    def _allocate(self, like: Any) -> tuple[Any, list[torch.Tensor]]:
        """The result as simulated tensors, and the plain memory of its new ones."""
        outputs: list[torch.Tensor] = []
        written = iter(self.written)

        def new(tensor: torch.Tensor) -> SimulatedTensor:
            output = self.simulated.empty(tensor.size(), tensor.stride(), tensor.dtype)
            outputs.append(output.raw)
            return output

        values = [
            _map(new, item) if value.alias_info is None else next(written)
            for value, item in zip(self.returns, _items(self.returns, like), strict=True)
        ]
        return (values[0] if len(values) == 1 else tuple(values) or None), outputs


_shapes: dict[Any, Any] = {}


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    # The dispatcher's arguments and results nest only in lists and tuples; torch's pytree is slower.
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_map(function, item) for item in value])
    return value


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_signature(item) for item in value])
    return type(value), value


def _items(returns: Sequence[Any], result: Any) -> tuple[Any, ...]:
    if not returns:
        return ()
    return (result,) if len(returns) == 1 else tuple(result)


def _new_tensors(returns: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """The tensors of a result that are not aliases of arguments."""
    pairs = zip(returns, _items(returns, result), strict=True)
    return _tensors(item for value, item in pairs if value.alias_info is None)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if isinstance(tensor, SimulatedTensor) else tensor.detach()


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _fill(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
