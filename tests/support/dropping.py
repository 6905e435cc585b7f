"""What runs when an object is dropped."""

import sys
from types import FrameType


def python_calls_while_dropping(box: list[object]) -> list[str]:
    """The Python functions that run while the objects of a list are dropped; the list must be their only owner."""
    calls: list[str] = []

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(record)
    try:
        box.clear()
    finally:
        sys.setprofile(None)
    return calls
