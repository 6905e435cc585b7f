"""docs/troubleshooting.md: every error class has a section there, and each address in the code leads to one."""

from __future__ import annotations

from aiofeed.kernel.core import errors
from tests.docs.test_docs import anchors
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"


def test_every_error_class_has_a_section() -> None:
    """The section of a class has its name, in small letters, as anchor."""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    names = {cls.__name__.lower() for cls in classes if not cls.__name__.startswith("_")}
    assert len(names) >= 12
    assert names - anchors(PAGE) == set()


def test_addresses_in_messages_lead_to_a_section() -> None:
    """Errors whose cause is often not in the message end with the address of their section."""
    for name in ("BatchFailedError", "CacheError", "TooManyFailures", "WorkerDiedError"):
        [note] = getattr(errors, name)("what happened").__notes__
        assert note == f"causes and fixes: https://aiofeed.github.io/aiofeed/troubleshooting.html#{name.lower()}"
        assert name.lower() in anchors(PAGE)
    assert not hasattr(errors.StateError("what happened"), "__notes__")
