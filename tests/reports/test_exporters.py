"""Statistics as metrics of Prometheus, OpenTelemetry, TensorBoard and Lightning, with the real packages."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed import Feeder
from aiofeed.exporters import METRICS, OpenTelemetryMetrics, PrometheusCollector
from aiofeed.reports import FeedStatistics, StorageStatistics

# The packages warn about themselves.
integration = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

NAMES = {
    "aiofeed_samples_total",
    "aiofeed_batches_total",
    "aiofeed_batches_left_out_total",
    "aiofeed_read_bytes_total",
    "aiofeed_read_seconds_total",
    "aiofeed_decode_seconds_total",
    "aiofeed_collate_seconds_total",
    "aiofeed_copy_seconds_total",
    "aiofeed_stall_seconds_total",
    "aiofeed_idle_seconds_total",
    "aiofeed_wall_seconds_total",
    "aiofeed_failures_total",
    "aiofeed_retries_total",
    "aiofeed_queue_depth",
    "aiofeed_read_concurrency",
    "aiofeed_decode_threads",
    "aiofeed_chunk_size",
    "aiofeed_gil_seconds",
}
STORAGE_NAMES = {
    "aiofeed_storage_requests_total",
    "aiofeed_storage_read_bytes_total",
    "aiofeed_storage_retries_total",
    "aiofeed_storage_hedges_total",
    "aiofeed_storage_latency_p50_seconds",
    "aiofeed_storage_latency_p95_seconds",
    "aiofeed_storage_latency_p99_seconds",
    "aiofeed_storage_cache_hits_total",
    "aiofeed_storage_cache_misses_total",
    "aiofeed_storage_cached_bytes",
}
"""Dashboards depend on these names."""


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


class Measured:
    """Statistics that a test sets."""

    def __init__(self, **values: Any) -> None:
        self.found = FeedStatistics(**values)

    def statistics(self, total: bool = False) -> FeedStatistics:
        assert total
        return self.found


@pytest.fixture
def feeder() -> Iterator[Feeder[Any]]:
    with Feeder(Squares(), batch_size=4) as made:
        yield made


class TestScalars:
    def test_names_and_values(self) -> None:
        """Names are stable, values are floats, and shares are of the wall-clock time."""
        found = FeedStatistics(
            samples=200, batches=2, wall_s=4.0, stall_s=1.0, idle_s=2.0, bytes_read=8, by_source={"a": 7}
        ).scalars()
        assert {type(value) for value in found.values()} == {float}
        expected = {"samples_per_s": 50.0, "bytes_per_s": 2.0, "waiting_share": 0.25, "idle_share": 0.5}
        expected |= {"samples": 200.0, "read_s": 0.0, "stall_s": 1.0, "by_source/a": 7.0, "queue_depth": 0.0}
        assert {name: found[f"aiofeed/{name}"] for name in expected} == expected

    def test_storage_and_prefix(self) -> None:
        """Statistics of storage are included, and the prefix may be another one."""
        found = FeedStatistics(storage=StorageStatistics(requests=3, latency_p99_s=0.5)).scalars("val/")
        assert (found["val/storage_requests"], found["val/storage_latency_p99_s"]) == (3.0, 0.5)
        assert found["val/samples_per_s"] == 0.0

    def test_feeder(self, feeder: Feeder[Any]) -> None:
        """A feeder gives the scalars of its current or last epoch."""
        list(feeder)
        list(feeder)
        assert feeder.scalars()["aiofeed/samples"] == 26.0
        assert feeder.scalars() == feeder.statistics().scalars()


class TestPrometheus:
    pytestmark = integration

    def values(self, registry: Any) -> dict[str, float]:
        return {
            f"{sample.name}{sample.labels}": sample.value for family in registry.collect() for sample in family.samples
        }

    def registry(self, *arguments: Any, **options: Any) -> Any:
        prometheus_client = pytest.importorskip("prometheus_client")
        found = prometheus_client.CollectorRegistry(auto_describe=True)
        found.register(PrometheusCollector(*arguments, **options))
        return found

    def test_names(self, feeder: Feeder[Any]) -> None:
        """The exposition has every name, with the feeder's name and the totals of all epochs."""
        registry = self.registry(feeder, "mine")
        list(feeder)
        list(feeder)
        found = self.values(registry)
        assert set(found) == {f"{name}{{'feeder': 'mine'}}" for name in NAMES}
        assert found["aiofeed_samples_total{'feeder': 'mine'}"] == 52.0
        assert found["aiofeed_wall_seconds_total{'feeder': 'mine'}"] == pytest.approx(feeder.statistics(True).wall_s)

    def test_storage_and_units(self) -> None:
        """Storage has metrics of its own; microseconds become seconds."""
        measured = Measured(gil_us=80.0, storage=StorageStatistics(requests=5, latency_p50_s=0.25))
        found = self.values(self.registry(measured))
        assert {name.partition("{")[0] for name in found} == NAMES | STORAGE_NAMES
        assert found["aiofeed_gil_seconds{'feeder': 'train'}"] == pytest.approx(80e-6)
        assert found["aiofeed_storage_latency_p50_seconds{'feeder': 'train'}"] == 0.25

    def test_several_feeders(self) -> None:
        """Several feeders are in one family per metric, as the format requires."""
        pytest.importorskip("prometheus_client")
        from prometheus_client import generate_latest
        from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
        from prometheus_client.openmetrics.parser import text_string_to_metric_families

        one, other = Measured(samples=1), Measured(samples=2)
        registry = self.registry({"train": one, "val": other})
        assert b'aiofeed_samples_total{feeder="val"} 2.0' in generate_latest(registry)
        families = list(text_string_to_metric_families(generate_openmetrics(registry).decode()))
        assert len(families) == len(METRICS)

    def test_counters_never_fall(self) -> None:
        """A counter that is read while an epoch begins does not fall, which would count as a restart."""
        measured = Measured(samples=10, queue_depth=2)
        registry = self.registry(measured)
        self.values(registry)
        measured.found = FeedStatistics(samples=4, queue_depth=1)
        found = self.values(registry)
        assert found["aiofeed_samples_total{'feeder': 'train'}"] == 10.0
        assert found["aiofeed_queue_depth{'feeder': 'train'}"] == 1.0

    def test_feeder_is_not_kept_alive(self) -> None:
        """A feeder that is dropped ends, and its metrics with it."""
        measured = Measured()
        registry = self.registry(measured)
        del measured
        gc.collect()
        assert self.values(registry) == {}

    def test_over_http_while_training(self, feeder: Feeder[Any]) -> None:
        """Prometheus reads the metrics from a server's thread during many short epochs, with counters that grow."""
        prometheus_client = pytest.importorskip("prometheus_client")
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry=self.registry(feeder))
        seen, stop = [], threading.Event()

        def scrape() -> None:
            while not stop.is_set():
                with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
                    text = answer.read().decode()
                [line] = [line for line in text.splitlines() if line.startswith("aiofeed_samples_total")]
                seen.append(float(line.split()[-1]))

        reader = threading.Thread(target=scrape)
        reader.start()
        epochs = 0
        while epochs < 100 or len(seen) < 5:
            list(feeder)
            epochs += 1
        stop.set()
        reader.join(60)
        server.shutdown()
        server.server_close()
        thread.join(60)
        assert seen == sorted(seen)
        assert seen[-1] <= 26 * epochs

    @pytest.mark.parametrize("wrong", [3, {"train": 3}, {1: Measured()}])
    def test_wrong_arguments(self, wrong: Any) -> None:
        """What has no statistics is refused."""
        for exporter in (PrometheusCollector, OpenTelemetryMetrics):
            with pytest.raises(TypeError, match="expected a Feeder, or a dict of names and Feeders, got"):
                exporter(wrong)


@pytest.mark.parametrize(
    ("exporter", "package", "extra"),
    [
        (PrometheusCollector, "prometheus_client.core", "prometheus"),
        (OpenTelemetryMetrics, "opentelemetry.metrics", "otel"),
    ],
)
def test_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, exporter: Any, package: str, extra: str
) -> None:
    """Without its package an exporter raises an ImportError that names the extra."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'aiofeed\[{extra}\]'"):
        exporter(Measured())


def test_imports_nothing() -> None:
    """The exporters import their packages when they are made, not before."""
    packages = "{'prometheus_client', 'opentelemetry'}"
    code = f"import sys, aiofeed; aiofeed.exporters.PrometheusCollector; print({packages} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


def test_every_field_is_exported() -> None:
    """Each number of the statistics is a metric, except the time of the first batch of the first epoch."""
    fields = {f.name for f in dataclasses.fields(FeedStatistics)} - {
        "first_batch_s",
        "by_source",
        "tokens_by_source",
        "storage",
    }
    fields |= {f"storage.{f.name}" for f in dataclasses.fields(StorageStatistics)}
    assert {metric.field for metric in METRICS} == fields


class TestOpenTelemetry:
    pytestmark = integration

    def test_values(self, feeder: Feeder[Any]) -> None:
        """A reader of the SDK gets every metric with unit and the feeder's name; counters are monotonic sums."""
        pytest.importorskip("opentelemetry.sdk")
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

        reader, measured = InMemoryMetricReader(), Measured(samples=3)
        provider = MeterProvider([reader])
        OpenTelemetryMetrics({"train": feeder, "val": measured}, meter=provider.get_meter("test"))
        list(feeder)
        data = reader.get_metrics_data()
        assert data is not None
        found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        assert {name.replace(".", "_", 1) for name in found} == {name.removesuffix("_total") for name in NAMES}
        samples: Any = found["aiofeed.samples"].data
        assert isinstance(samples, Sum)
        assert samples.is_monotonic
        points = {point.attributes["feeder"]: point.value for point in samples.data_points}
        assert points == {"train": 26.0, "val": 3.0}
        assert found["aiofeed.stall_seconds"].unit == "s"
        provider.shutdown()


class TestTensorBoard:
    pytestmark = integration

    def test_scalars(self, feeder: Feeder[Any], tmp_path: Path) -> None:
        """`SummaryWriter` writes the scalars, and TensorBoard reads them."""
        pytest.importorskip("tensorboard")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
            from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter(str(tmp_path)) as writer:
            for step, _ in enumerate(feeder):
                for name, value in feeder.scalars().items():
                    writer.add_scalar(name, value, step)
        events = EventAccumulator(str(tmp_path)).Reload()
        assert [event.value for event in events.Scalars("aiofeed/batches")] == [1, 2, 3, 4, 5, 6, 7]


class TestLightning:
    pytestmark = integration

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        """Skip the tests if Lightning is not installed."""
        pytest.importorskip("lightning")

    def fit(self, folder: Path, feeder: Any, monitor: Any, **options: Any) -> dict[int, dict[str, float]]:
        """Train two epochs; returns what was logged by step."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lightning = pytest.importorskip("lightning.pytorch")
        from lightning.pytorch.loggers.logger import DummyLogger

        logged: dict[int, dict[str, float]] = {}

        class Logger(DummyLogger):
            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                logged.setdefault(step, {}).update(metrics)

        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(2, 1)

            def training_step(self, batch: Any, _: int) -> Any:
                batch = batch["a"] if isinstance(batch, dict) else batch
                return self.linear(batch / 26).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = lightning.Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            max_epochs=2,
            callbacks=[monitor],
            logger=Logger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=3,
            **options,
        )
        trainer.fit(Module(), feeder)
        return logged

    def test_logged(self, feeder: Feeder[Any], tmp_path: Path) -> None:
        """The callback logs the feeder's scalars every n batches and at the end of each epoch."""
        from aiofeed.lightning import FeederMonitor

        logged = self.fit(tmp_path, feeder, FeederMonitor())
        samples = {step: found["aiofeed/samples"] for step, found in logged.items() if "aiofeed/samples" in found}
        assert samples == {3: 12.0, 6: 24.0, 7: 26.0, 10: 12.0, 13: 24.0, 14: 26.0}

    def test_given_feeder_and_prefix(self, feeder: Feeder[Any], tmp_path: Path) -> None:
        """The feeder may be given, for example of a loader inside of another one."""
        from aiofeed.lightning import FeederMonitor

        logged = self.fit(tmp_path, {"a": feeder}, FeederMonitor(feeder, "a/"), limit_train_batches=3)
        assert logged[3]["a/samples"] == 12.0

    def test_no_feeder(self, tmp_path: Path) -> None:
        """A Trainer whose loader is no feeder gets an error that says what to pass."""
        from aiofeed.lightning import FeederMonitor

        loader = torch.utils.data.DataLoader(Squares(), batch_size=4)
        with pytest.raises(TypeError, match=r"logs an aiofeed\.Feeder, got .*: pass FeederMonitor\(feeder\)"):
            self.fit(tmp_path, loader, FeederMonitor())


@pytest.mark.parametrize("name", ["PrometheusCollector", "OpenTelemetryMetrics"])
def test_public(name: str) -> None:
    """The exporters are public names."""
    assert getattr(aiofeed.exporters, name).__module__ == "aiofeed.exporters"
