"""States of feeders."""

from __future__ import annotations

from typing import Any


def edited_state(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A state with other values, and without the receipt, which is that of its position."""
    return {name: value for name, value in (state | changes).items() if name not in ("receipt", "trail")}
