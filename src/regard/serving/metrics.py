"""The metrics of the server, in the format of Prometheus."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters and histograms of one server. Every server has its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"regard_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Answered requests.", "route", "status")
        self.refused = counter("refused", "Requests refused because the queue was full.", "model")
        self.late = counter("timeouts", "Requests that were not answered in time.", "model")
        self.gone = counter("disconnects", "Requests whose client closed the connection.", "model")
        self.read = counter("input_tokens", "Tokens that models have read.", "model")
        self.written = counter("output_tokens", "Tokens that models have generated.", "model")
        self.seconds = Histogram(
            "regard_request_seconds", "Time to the end of the answer.", ("route",), registry=self.registry
        )
        self.batch = Histogram(
            "regard_batch_rows", "Rows in a batch when it starts.", ("model",), buckets=SIZES, registry=self.registry
        )

    def watch(self, service: Any) -> None:
        """Report the lengths of the queues of a service."""
        self.registry.register(Queues(service))

    def page(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


class Queues:
    """Collects the numbers of requests and rows of every model when the metrics are read."""

    def __init__(self, service: Any) -> None:
        self.service = service

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the names of the metrics."""
        return self._families()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics with their present values."""
        active, waiting, running = families = self._families()
        for name, model in self.service.models.items():
            for family, value in zip(families, (model.active, *model.scheduler.sizes), strict=True):
                family.add_metric([name], value)
        yield from (active, waiting, running)

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, ...]:
        return (
            GaugeMetricFamily("regard_active_requests", "Requests that wait or run.", labels=["model"]),
            GaugeMetricFamily("regard_waiting_rows", "Rows that wait for a batch.", labels=["model"]),
            GaugeMetricFamily("regard_running_rows", "Rows that are being computed.", labels=["model"]),
        )
