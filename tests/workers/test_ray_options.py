"""`engine="ray"`: what is refused before a cluster is looked for, and how many actors are wanted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from aiofeed import Feeder, Limits
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.processes import RayEngine
from aiofeed.workers.ray.actor_pool import ActorDemand
from tests.support import process_parts as parts

pytest.importorskip("ray")


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command."""
    monkeypatch.setattr("aiofeed.kernel.feeder.arguments.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'aiofeed\[ray\]'"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray")


@pytest.mark.parametrize("engine", ["ray:", "ray:0", "ray:x", "rays"])
def test_an_unknown_engine_is_refused(engine: Any) -> None:
    """The message has the value and the allowed ones."""
    with pytest.raises(ValueError, match=r"engine='ray.*RayEngine"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=engine)


def test_options_are_checked() -> None:
    """Each error names the option and the value."""
    with pytest.raises(ValueError, match=r"RayEngine\(max_actors=...\).*4.*got 3"):
        RayEngine(4, max_actors=3)
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
    with pytest.raises(ValueError, match="engine='ray' is not possible with cache='host'"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray", cache="host")
    with pytest.raises(ValueError, match=r"decode_threads=1.*ray:2.*at least 2"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray:2", limits=Limits(decode_threads=1))


def take(
    demand: ActorDemand, batches: int, *, waits_s: float, step_s: float, busy: bool = True, first_s: float = 9
) -> int:
    """Take the batches of an epoch of four actors; returns how many are wanted after the last."""
    stats, wanted = EpochStats(), 4
    for number in range(batches):
        stats.stall_s += waits_s if number else 9.0
        stats.wall_s += waits_s + step_s if number else 9.0
        assert wanted == 4
        wanted = demand.wanted(4, stats, busy=busy)
    return wanted


@pytest.mark.parametrize(
    ("waits_s", "step_s", "wanted"),
    [(0.09, 0.91, 4), (0.3, 0.7, 6), (0.5, 0.5, 8), (1, 0, 8), (0, 1, 4)],
)
def test_as_many_actors_are_wanted_as_the_training_needs(waits_s: float, step_s: float, wanted: int) -> None:
    """With n actors and a training that waits a share of the time, n / (1 - share), and at most twice as many."""
    assert take(ActorDemand(), 17, waits_s=waits_s, step_s=step_s) == wanted


def test_no_actor_is_wanted_before_the_demand_is_measured() -> None:
    """A measurement takes 16 batches and a second, over several epochs without their first batches; then the next one
    begins."""
    demand = ActorDemand()
    assert take(demand, 16, waits_s=0.5, step_s=0.5) == 4
    assert take(demand, 2, waits_s=0.5, step_s=0.5) == 8
    assert take(demand, 16, waits_s=0.5, step_s=0.5) == 4
    assert take(ActorDemand(), 20, waits_s=0.02, step_s=0.02) == 4
    assert take(ActorDemand(), 26, waits_s=0.02, step_s=0.0201) == 8


def test_idle_actors_are_no_demand() -> None:
    """If the training waits while an actor has no work, more actors would not help."""
    assert take(ActorDemand(), 17, waits_s=1, step_s=0, busy=False) == 4
