"""Raises Ctrl-C at a chosen place in aiofeed's code."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place in aiofeed at which the interpreter may run signal handlers.

    These places are the start of a function, the return from a C function, and a backward jump.
    """

    def __init__(self, n: int) -> None:
        self.left = n
        self._before: dict[FrameType, str] = {}
        self._into_python: set[FrameType] = set()

    def __enter__(self) -> Interrupt:
        # Python 3.12 and 3.13 trace no opcodes if no frame has asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._before.clear()
        self._into_python.clear()

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_back is not None:
            self._into_python.add(frame.f_back)
        # The simulated device stands for C code, which is not interrupted.
        if "/aiofeed/" not in frame.f_code.co_filename or "/testing/" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "opcode":
            return self._opcode
        before = self._before.get(frame, "")
        now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        self._before[frame] = now
        called_python = frame in self._into_python
        self._into_python.discard(frame)
        if before in ("", "RESUME") or now == "JUMP_BACKWARD" or (before.startswith("CALL") and not called_python):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
        return self._opcode
