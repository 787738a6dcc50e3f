"""What Prometheus gets of all users' states; docs/jupyterhub/grafana.json shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .service_census import Census
from .service_records import UserReport, seconds

_P: Final = "gpu_ckpt_hub_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Metrics of a census, in a registry of their own."""

    def __init__(self, census: Census) -> None:
        self._census = census
        self._registry = CollectorRegistry()
        self.actions = PrometheusCounter(
            f"{_P}actions",
            "What was done on the page, by what came of it",
            ["action", "result"],
            registry=self._registry,
        )
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        reports, census = self._census.known(), self._census
        users = sum(not report.deleted for report in reports)
        yield GaugeMetricFamily(f"{_P}users", "Users of the hub", value=users)
        yield GaugeMetricFamily(
            f"{_P}up", "Whether the hub says who its users are", value=float(census.problem is None)
        )
        if census.finished is not None:
            yield GaugeMetricFamily(
                f"{_P}read_timestamp_seconds",
                "When all stores were read last (Unix time)",
                value=census.finished,
            )
            yield GaugeMetricFamily(
                f"{_P}read_seconds", "How long reading all stores took", value=census.took
            )
        yield from _by_user(reports)
        yield from _by_user_and_kind(reports)


def _by_user(reports: list[UserReport]) -> Iterator[GaugeMetricFamily]:
    def family(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(_P + name, text, labels=["user"])

    readable = family("store_readable", "Whether the user's store could be read")
    used = family("used_bytes", "What the user's states take in the store, which a quota counts")
    size = family("logical_bytes", "What the user's states hold")
    quota = family("quota_bytes", "What the user's states may take")
    states = family("states", "Saved states")
    pinned = family("pinned_states", "States that stay whatever the rules say")
    damaged = family("damaged_states", "States that are known to be damaged")
    newest = family("newest_state_timestamp_seconds", "When the newest state was saved (Unix time)")
    for report in reports:
        label = [report.user]
        readable.add_metric(label, float(report.problem is None))
        if report.quota is not None:
            quota.add_metric(label, report.quota)
        if report.read is None:
            continue
        summary = report.summary()
        used.add_metric(label, report.used)
        size.add_metric(label, report.size)
        states.add_metric(label, summary.states)
        pinned.add_metric(label, summary.pinned)
        damaged.add_metric(label, summary.damaged)
        if report.newest is not None:
            newest.add_metric(label, seconds(report.newest))
    yield from (readable, used, size, quota, states, pinned, damaged, newest)


def _by_user_and_kind(reports: list[UserReport]) -> Iterator[GaugeMetricFamily]:
    kernels = GaugeMetricFamily(
        f"{_P}kernels", "Kernels by what has become of them", labels=["user", "status"]
    )
    failed = GaugeMetricFamily(
        f"{_P}failed_kernels", "Kernels whose last save failed, by why", labels=["user", "reason"]
    )
    took = GaugeMetricFamily(
        f"{_P}last_stop_seconds", "How long the saves before a server's stop took", labels=["user"]
    )
    stopped = GaugeMetricFamily(
        f"{_P}last_stop_kernels",
        "Kernels with something to save before that stop",
        labels=["user", "result"],
    )
    for report in reports:
        if report.read is None:
            continue
        for stop in report.stops[:1]:
            took.add_metric([report.user], stop.seconds)
            stopped.add_metric([report.user, "saved"], stop.saved)
            stopped.add_metric([report.user, "not_saved"], stop.kernels - stop.saved)
        found = Counter(kernel.status for kernel in report.kernels)
        for status in ("running", "hibernated", "lost", "ended"):
            kernels.add_metric([report.user, status], found[status])
        for reason, count in Counter(failure.reason for failure in report.failures).items():
            failed.add_metric([report.user, reason], count)
    yield from (kernels, failed, took, stopped)
