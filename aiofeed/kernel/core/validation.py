"""Argument checks: each returns the value, or raises an error with the received value and what is allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from aiofeed.kernel.core.formatting import brief

# The argument of a function that is passed by this name.
_GETS = {"decode": "the bytes of a sample without its target", "collate_fn": "the samples", "transform": "the batch"}
_TARGETS = ("cls", "label", "labels", "target")  # usual names of the target in a sample of several files
# The variables in which launchers give the number of ranks on a machine: torchrun, also in Accelerate and Ray Train,
# DeepSpeed, Open MPI, MPICH and Intel MPI, MVAPICH, and srun, whose "8(x2)" is 8 on each of 2 machines. srun and mpirun
# may start one of those before them.
LAUNCHERS = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "SLURM_STEP_TASKS_PER_NODE",
)

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
Ways: TypeAlias = Mapping[str, str | Callable[[Any], str]]


def counted(number: int, noun: str) -> str:
    """Return a number of things for a message: ``"1 sample"``, ``"2 batches"``, ``"3 epochs"``."""
    return f"{number} {noun}" + ("es" if noun.endswith(("s", "tch")) else "s") * (number != 1)


def length_of(value: Any) -> int | None:
    """Return the length of a sampler, a data set or a loader; ``None`` if it is not known."""
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - of the user's __len__, which may raise anything: torch does not call it
        return None


def number_from_environment(name: str, default: int) -> int:
    """Return the number in an environment variable, or the first of a list such as "8(x2),4".

    ``default`` if there is none, which is no error of the user.
    """
    try:
        return int(os.environ.get(name, "").split(",")[0].split("(")[0])
    except ValueError:
        return default


def launched_ranks(default: int = 1) -> tuple[int, str]:
    """Return the number of ranks on this machine, and the variable that has it; ``default`` and "" if none has."""
    found = ((number_from_environment(name, 0), name) for name in LAUNCHERS)
    return next((each for each in found if each[0] > 0), (default, ""))


def local_ranks(default: int = 1) -> int:
    """Return the number of ranks on this machine, as their launcher says; ``default`` if none does."""
    return launched_ranks(default)[0]


def check_int(name: str, value: object) -> int:
    """Return the value as an int. Integers of numpy are allowed; bools and floats are not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # __index__ is what Python accepts as an index. Tensors and arrays have it too, but also a __len__; so have bools of
    # numpy 1.
    kind = type(value)
    if kind.__name__ in ("bool", "bool_") or not hasattr(kind, "__index__") or hasattr(kind, "__len__"):
        raise TypeError(f"{name} must be an int, got {brief(value)}")
    return operator.index(value)  # type: ignore[arg-type]


def check_int_from(least: int, name: str, value: object) -> int:
    """Return the value as an int of at least ``least``."""
    number = check_int(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def check_positive_int(name: str, value: object) -> int:
    """Return the value as an int of at least 1."""
    return check_int_from(1, name, value)


def check_bool(name: str, value: object) -> bool:
    """Return the value, which must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {brief(value)}")
    return value


def check_callable(name: str, value: Any, keywords: Sequence[str] = ()) -> Any:
    """Return the value, which must be ``None`` or an ordinary function that takes one argument and ``keywords``."""
    if value is None:
        return value
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")
    if isinstance(value, type) and "__call__" in dir(value):  # its instances are called; others are like functions
        raise TypeError(f"{name} must be a function, got the class {value.__name__}; pass an instance")
    if is_async_function(value) or _is_kind(inspect.isasyncgenfunction, value):
        raise TypeError(f"{name} must be an ordinary function; {value!r} is `async def`: await in an `async read`")
    if _is_kind(inspect.isgeneratorfunction, value):
        raise TypeError(f"{name} is a generator function, {value!r}: use `return` in place of `yield`")
    try:
        # Not of the function that functools.wraps names, because its wrapper is called.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):
        return value  # it has no signature
    try:
        signature.bind(None, **dict.fromkeys(keywords))
    except TypeError as error:
        gets = f"{name} is called with one argument, {_GETS.get(name, 'a value')}"
        raise TypeError(f"{gets}; {value!r} takes others ({error}): set those with functools.partial") from None
    return value


def check_bytes(decoder: object, data: object, file: str = "file") -> bytes:
    """Return the bytes of one file, which a decoder gets."""
    if isinstance(data, bytes):
        return data
    takes = f"{decoder} takes the bytes of one {file}, "
    if isinstance(data, Mapping):
        names = sorted(map(str, data))
        wanted = "".join([f"data={name!r}" for name in names if name not in _TARGETS][:1])
        wanted += "".join([f", target={name!r}" for name in names if name in _TARGETS][:1])
        raise TypeError(
            f"{takes}got {type(data).__name__}: pass {wanted} to the source: its samples have {', '.join(names)}"
        )
    try:
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except TypeError:
        way = "for an image and its mask pass decode=DecodePair(DecodeImage(size)), else a function of your own"
        way = "read the file: pathlib.Path(path).read_bytes()" if isinstance(data, str | os.PathLike) else way
        raise TypeError(f"{takes}got {type(data).__name__}; {way}") from None


def check_returned(name: str, value: Any, number: int | None = None) -> Any:
    """Return the batch that a user's function has returned; ``TypeError`` if it has returned ``None``."""
    if value is None:
        batch = "" if number is None else f" for batch {number}"
        raise TypeError(f"{name} returned None{batch}: return the batch, also if it was changed in place")
    return value


def check_seed(value: object) -> int:
    """Return the value as a seed; a torch generator takes it plus any epoch number."""
    if value is None:
        raise TypeError("seed must be an int, got None; for another order in each run: seed=random.randrange(2**62)")
    seed = check_int("seed", value)
    if not -(1 << 62) <= seed < 1 << 62:
        raise ValueError(f"seed must be between -2**62 and 2**62 - 1, got {seed}")
    return seed


def check_epoch(name: str, value: object) -> int:
    """Return the value as the number of an epoch; below 2**32, so that its samples can be counted in 64 bits."""
    epoch = check_int_from(0, name, value)
    if epoch >= 1 << 32:
        raise ValueError(f"{name} must be below 2**32, got {epoch}")
    return epoch


def check_collate_fn(value: Any) -> Any:
    """Return the value of ``collate_fn=``, which is ``None`` or a function, and not a function that makes one."""
    if getattr(value, "makes_collate_fn", False):
        raise TypeError(f"aiofeed.{value.__name__} makes a collate_fn; call it: collate_fn=aiofeed.{value.__name__}()")
    return check_callable("collate_fn", value)


def explain_arguments(
    ways: Ways | Callable[[], Ways] = MappingProxyType({}),
    *,
    hint: str | Callable[[Sequence[Any]], str] = "",
) -> Callable[[CallableT], CallableT]:
    """Decorate a class or function so that an argument that it does not have is an error that names the alternative.

    Args:
        ways: What to do instead of passing an argument, by its name; as a function, it gets the value that was passed.
            For other arguments, the ``TypeError`` names the most similar one of these and of those that exist. Or a
            function that returns them.
        hint: What to do about more positional arguments. As a function, it gets these, and its text takes the place of
            the names of arguments that are passed by name.
    """

    def decorate(target: CallableT) -> CallableT:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        parameters = inspect.signature(function).parameters
        known = set(parameters) - {"self"}
        positional = sum(each.kind is not each.KEYWORD_ONLY for each in parameters.values())

        @functools.wraps(function)
        def checked(*args: Any, **arguments: Any) -> Any:
            kind = type(args[0]) if args and isinstance(target, type) else target
            name = (kind if kind.__module__ == "aiofeed" else target).__name__  # of a public subclass
            if len(args) > positional:
                rest = ", ".join(f"{each}=" for each in [*parameters][positional:]) or "none"
                rest = rest + hint if isinstance(hint, str) else hint(args[positional:]) or rest
                raise TypeError(f"{name} takes its further arguments by name: {rest}")
            if unknown := next((each for each in arguments if each not in known), None):
                value, message = arguments[unknown], f"{name} has no argument {unknown!r}"
                others = ways() if callable(ways) else ways
                near = next(iter(difflib.get_close_matches(unknown, [*known, *others], n=1)), "")
                if near in others:
                    way, given = others[near], f"{near}={brief(value)}"
                    message += f" ({given}): " if near == unknown else f"; did you mean {given}? "
                    message += way if isinstance(way, str) else way(value)
                elif near:
                    message += f"; did you mean {near}=?"
                if near:
                    raise TypeError(message)
            return function(*args, **arguments)

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate


def is_async_function(value: Any) -> bool:
    """Return whether calling the value returns a coroutine."""
    return _is_kind(inspect.iscoroutinefunction, value)


def _is_kind(is_kind: Callable[[Any], bool], value: Any) -> bool:
    # The flags of Mock(spec=function) are no number, which inspect expects of all that looks like a function.
    flags = getattr(getattr(value, "__code__", None), "co_flags", 0)
    return isinstance(flags, int) and any(map(is_kind, (value, getattr(value, "__call__", None))))  # noqa: B004
