"""`engine="ray"`: what is refused before a cluster is looked for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from aiofeed import Feeder, Limits, RayEngine
from tests.support import process_parts as parts

pytest.importorskip("ray")


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command."""
    monkeypatch.setattr("aiofeed.feeder.config.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'aiofeed\[ray\]'"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray")


@pytest.mark.parametrize("engine", ["ray:", "ray:0", "ray:x", "rays"])
def test_an_unknown_engine_is_refused(engine: Any) -> None:
    """The message has the value and the allowed ones."""
    with pytest.raises(ValueError, match=r"engine='ray.*RayEngine"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=engine)


def test_options_are_checked() -> None:
    """Each error names the option and the value."""
    for options in ({"actors": 0}, {"cpus_per_actor": 0}, {"retries": -1}, {"start_timeout_s": 0}):
        with pytest.raises(
            ValueError, match=f"RayEngine\\({next(iter(options))}=...\\).*got {next(iter(options.values()))}"
        ):
            RayEngine(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cpus_per_actor"):
        RayEngine(num_cpus=1)  # type: ignore[call-arg]


def test_what_cannot_be_sent_is_refused_by_the_constructor() -> None:
    """The message has the argument, the reason and what to do."""
    source = parts.Numbers(4)
    source.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"source=.*cannot be sent to an actor.*lock.*engine=\"thread\""):
        Feeder(source, decode=parts.number, batch_size=2, engine="ray")
    with pytest.raises(ValueError, match=r'cache="host".*engine="ray" decodes in other processes'):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray", cache="host")
    with pytest.raises(ValueError, match=r"decode_threads=1.*ray:2.*at least 2"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray:2", limits=Limits(decode_threads=1))
