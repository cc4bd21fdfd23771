"""The metrics of a broker, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector

from coranto.member.etcd_budget import EtcdBudgetMetrics
from coranto_broker.fast_counters import FastCounter, FastHistogram, FastLabeledCounter
from coranto_broker.quotas import QuotaMetrics

WATCHED: Final = {
    "journals": "Journals that are assigned to this broker.",
    "journals_held_back": "Journals that refuse appends: too much content is unstored, or their store refuses it.",
    "fragments_pending": "Completed fragments that are not in their store yet.",
    "fragments_without_copy": "Of these, fragments whose local file is damaged and that have no known good copy yet.",
    "spools_unreadable": "Spools that cannot be read from the disk; the broker retries.",
    "disk_short_of_room": "1 while less than disk_reserve_bytes is free; else 0.",
    "append_bytes_held": "Bytes held of unanswered appends, and of answers that clients have not read.",
    "unpersisted_bytes": "Content that this broker must store and has not stored yet, growing fragments included.",
    "unpersisted_age_seconds": "Time since the first append to the oldest unstored content; 0 without any.",
}
"""The help texts, by name, of gauges that are read from the broker at collection."""


class UnderWay:
    """A context manager that counts its open blocks. Reentrant."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class FramesUse(Protocol):
    """The usage of a frame server: its open connections and their unread bytes, by method."""

    on_refusal: Callable[[str], None]

    @property
    def unopened(self) -> int: ...

    def under_way(self, method: str) -> int: ...

    def held(self, method: str) -> int: ...


class Metrics:
    """The metrics of one broker, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.appends = FastLabeledCounter("coranto_appends", "Appends by outcome.", "outcome", self.registry)
        self.appends_refused = FastCounter(
            "coranto_appends_refused", "Appends that were refused because too many were under way.", self.registry
        )
        self.append_stream_waits = FastCounter(
            "coranto_append_stream_waits",
            "Waits of streams of appends because too many appends were under way.",
            self.registry,
        )
        self.acknowledged_below_demand = counter(
            "coranto_appends_below_demand", "Committed appends that survive less than their journal's labels demand."
        )
        self.append_streams_ended = counter(
            "coranto_append_streams_ended", "Streams of appends that were ended because they held too much.", ["reason"]
        )
        self.append_bytes = FastCounter("coranto_append_bytes", "Content of committed appends.", self.registry)
        self.append_seconds = FastHistogram(
            "coranto_append_seconds",
            "Time from an append's first message to its response.",
            (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            self.registry,
        )
        self.group_appends = FastHistogram(
            "coranto_group_appends",
            "Appends that were committed by one proposal.",
            (1, 2, 4, 8, 16, 32, 64, 128, 256),
            self.registry,
        )
        self.reads = counter("coranto_reads", "Reads that were begun.")
        self.reads_refused = counter(
            "coranto_reads_refused", "Blocking reads that were refused because their caller had too many."
        )
        self.read_bytes = counter("coranto_read_bytes", "Content sent to readers.")
        self.persisted = counter("coranto_fragments_stored", "Fragments stored.")
        self.persisted_bytes = counter("coranto_fragment_bytes_stored", "Uncompressed content of stored fragments.")
        self.persist_failures = counter("coranto_fragment_store_failures", "Attempts to store a fragment that failed.")
        self.damaged = counter("coranto_fragments_damaged", "Fragments whose local file was found to be damaged.")
        self.restored = counter("coranto_fragments_mended", "Of these, fragments restored from another broker's copy.")
        self.stores_healthy = gauge(
            "coranto_fragment_store_healthy",
            "Whether the last probe of a fragment store succeeded (1) or not (0).",
            ["store"],
        )
        self.http_requests = counter("coranto_http_requests", "Requests to the HTTP gateway.", ["method", "status"])
        self.removed = counter("coranto_fragments_removed", "Stored fragments that retention removed.")
        self.removed_bytes = counter("coranto_fragment_bytes_removed", "Uncompressed content of removed fragments.")
        self.removal_failures = counter(
            "coranto_fragment_removal_failures", "Attempts to remove a fragment that failed."
        )
        self.disk_failures = counter(
            "coranto_disk_failures", "Spools that the disk failed to keep, and that were recovered again."
        )
        self.etcd_budget = EtcdBudgetMetrics(self.registry)
        self.quotas = QuotaMetrics(self.registry)
        self.calls = gauge("coranto_calls", "Calls in flight.", ["method"])
        self.frame_connections = gauge("coranto_frame_connections", "Open connections for frames.", ["method"])
        self.frame_bytes_held = gauge(
            "coranto_frame_bytes_held",
            "Bytes that came over frames and that their handlers have not taken.",
            ["method"],
        )
        self.frame_connections_refused = counter(
            "coranto_frame_connections_refused",
            "Connections for frames that were refused or ended, for a fault of their client.",
            ["reason"],
        )

    def under_way(self, method: str) -> UnderWay:
        """Return a context manager that counts the calls of a method in flight."""
        calls = UnderWay()
        self.calls.labels(method).set_function(lambda: calls.count)
        return calls

    def watch_frames(self, frames: FramesUse, methods: Iterable[str], reasons: Iterable[str]) -> None:
        """Export the usage of a frame server, and count its refusals by reason."""
        for method in methods:
            self.frame_connections.labels(method).set_function(partial(frames.under_way, method))
            self.frame_bytes_held.labels(method).set_function(partial(frames.held, method))
        self.frame_connections.labels("unopened").set_function(lambda: frames.unopened)
        counters = {reason: self.frame_connections_refused.labels(reason) for reason in reasons}
        frames.on_refusal = lambda reason: counters[reason].inc()

    def store_probed(self, url: str, healthy: bool) -> None:
        """Set the health of a fragment store after a probe."""
        self.stores_healthy.labels(url).set(healthy)

    def store_forgotten(self, url: str) -> None:
        """Remove the health of a fragment store that is no longer used."""
        self.stores_healthy.remove(url)

    def watch(self, facts: dict[str, str], values: Mapping[str, Callable[[], float]]) -> None:
        """Add metrics of the process, the `facts` about the broker, and the gauges of WATCHED with their `values`."""
        ProcessCollector(registry=self.registry)
        Info("coranto_broker", "The identity and version of this broker.", registry=self.registry).info(facts)
        Gauge("coranto_tasks", "Tasks of the event loop.", registry=self.registry).set_function(
            lambda: len(asyncio.all_tasks())
        )
        for name, text in WATCHED.items():
            Gauge(f"coranto_{name}", text, registry=self.registry).set_function(values[name])
