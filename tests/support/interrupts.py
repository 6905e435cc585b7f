"""Raises Ctrl-C, or lets another thread run, at a chosen place in aiofeed's code."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from tests.support.paths import PACKAGE

_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_TOOL = 4  # a number that no profiler or debugger uses


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place in aiofeed at which the interpreter may run signal handlers.

    These places are the start of a function, the return from a C function, and a backward jump. At the same places the
    interpreter may run another thread: with ``meanwhile`` a new thread calls this function, and nothing is raised
    before it returns.
    """

    def __init__(self, n: int, meanwhile: Callable[[], object] | None = None) -> None:
        self.left = n
        self._meanwhile = meanwhile
        self._before: dict[FrameType, str] = {}
        self._into_python: set[FrameType] = set()
        self._thread = threading.get_ident()

    def __enter__(self) -> Interrupt:
        if sys.version_info < (3, 12):
            sys.settrace(self._call)
            return self
        # Since Python 3.13 a trace function gets no opcodes of the first call of a function.
        monitoring, events = sys.monitoring, sys.monitoring.events
        monitoring.use_tool_id(_TOOL, "tests")
        for event in (events.PY_START, events.PY_RESUME):
            monitoring.register_callback(_TOOL, event, self._entered)
        monitoring.register_callback(_TOOL, events.INSTRUCTION, self._instruction)
        monitoring.set_events(_TOOL, events.PY_START | events.PY_RESUME | events.INSTRUCTION)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.version_info < (3, 12):
            sys.settrace(None)
        else:
            sys.monitoring.set_events(_TOOL, 0)
            sys.monitoring.free_tool_id(_TOOL)
        self._before.clear()
        self._into_python.clear()

    def _entered(self, code: CodeType, offset: int) -> None:
        self._enter(sys._getframe(1))

    def _instruction(self, code: CodeType, offset: int) -> Any:
        if not _counts(code):
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        if threading.get_ident() == self._thread:
            self._opcode(sys._getframe(1), offset)
        return None

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        self._enter(frame)
        if not _counts(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._opcode(frame, frame.f_lasti)
        return self._traced

    def _enter(self, frame: FrameType) -> None:
        self._before.setdefault(frame, "")
        if frame.f_back is not None:
            self._into_python.add(frame.f_back)

    def _opcode(self, frame: FrameType, offset: int) -> None:
        if (before := self._before.get(frame)) is None:
            return  # an older generator is closed
        now = dis.opname[frame.f_code.co_code[offset]]
        self._before[frame] = now
        called_python = frame in self._into_python
        self._into_python.discard(frame)
        if before in ("", "RESUME") or now == "JUMP_BACKWARD" or (before in _CALLS and not called_python):
            if self.left == 0:
                self._thread = 0  # once
                self._act()
            self.left -= 1

    def _act(self) -> None:
        if self._meanwhile is None:
            raise KeyboardInterrupt
        thread = threading.Thread(target=self._meanwhile, daemon=True)
        thread.start()
        thread.join()


def interrupted_next(iterator: Any, place: int, seen: list[Any]) -> tuple[bool, bool]:
    """Append what `next` returns to `seen`, with Ctrl-C at a place: whether that came, and whether there was the place.

    The batch is awaited before, so that the same code runs each time.
    """
    iterator._queue.peek(30)
    with Interrupt(place) as interrupt:
        try:
            seen.append(next(iterator))
        except KeyboardInterrupt:
            return True, True
    return False, interrupt.left < 0


def _counts(code: CodeType) -> bool:
    # The simulated device stands for C code, which is not interrupted.
    return code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(f"{PACKAGE}testing")
