"""The structure that tensors are shared in: taken apart and checked, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from aiofeed.processes.shared_tensors.protocol import encode

Kind = Literal["tensor", "list", "tuple", "dict"]


def take_apart(tensors: Any) -> tuple[Kind, list[str | int], list[Any]]:
    """Their structure, the keys of a dict, and each tensor or array, detached.

    Raises:
        TypeError, ValueError: something among them cannot be shared.
    """
    kind, keys, items = _structure(tensors)
    names = [f"[{key!r}]" for key in keys or range(len(items))] if kind != "tensor" else [""]
    return kind, keys, [_checked(item, f"tensors{name}") for name, item in zip(names, items, strict=True)]


def _structure(tensors: Any) -> tuple[Kind, list[str | int], list[Any]]:
    if isinstance(tensors, torch.Tensor | np.ndarray):
        return "tensor", [], [tensors]
    kind: Kind
    if isinstance(tensors, Mapping):
        for key in tensors:
            if type(key) not in (str, int):
                raise TypeError(f"tensors has the key {key!r}: expected keys of type str or int")
        kind, keys, items = "dict", list(tensors), list(tensors.values())
        _check_keys(keys)
    elif type(tensors) in (list, tuple):
        kind, keys, items = ("list" if type(tensors) is list else "tuple"), [], list(tensors)
    else:
        raise TypeError(
            f"tensors: expected a tensor or array, or a list, tuple or dict of them, not {type(tensors).__name__}"
        )
    if not items:
        raise ValueError(f"tensors is an empty {kind}: there is nothing to share")
    return kind, keys, items


def _check_keys(keys: list[str | int]) -> None:
    try:
        encode(keys)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ValueError(f"tensors has a key that cannot be handed on: {error}") from None


def _checked(item: Any, where: str) -> Any:
    """The tensor or array itself, detached; an error for what is none, or has no plain memory."""
    if isinstance(item, np.ndarray):
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError(f"{where} is a masked array; share its data and its mask")
        array = np.asarray(item)
        try:
            torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
        except TypeError:
            raise TypeError(f"{where} is an array of {array.dtype}, for which there is no tensor") from None
        return array
    if not isinstance(item, torch.Tensor):
        raise TypeError(f"{where} is a {type(item).__name__}: expected a tensor or an array")
    if type(item) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TypeError(
            f"{where} is a {type(item).__name__}, which would come out as a plain tensor; if that is what you want, "
            f"share its .as_subclass(torch.Tensor)"
        )
    if item.layout is not torch.strided or item.is_nested:
        raise TypeError(f"{where} has the layout {item.layout}: expected a strided tensor, or share its parts")
    if item.is_quantized:
        raise TypeError(f"{where} is quantized; share its int_repr(), and its scales beside it")
    if item.device.type == "meta":
        raise TypeError(f"{where} is on the meta device: it has no values to share")
    return item.detach()


def assemble(kind: Kind, keys: Sequence[str | int], tensors: Sequence[torch.Tensor]) -> Any:
    """The structure of tensors in a row."""
    if kind == "tensor":
        return tensors[0]
    if kind == "dict":
        return dict(zip(keys, tensors, strict=True))
    return list(tensors) if kind == "list" else tuple(tensors)
