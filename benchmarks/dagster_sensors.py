"""Sensor ticks and the loading of definitions, by the number of journals.

The floor of a tick is the one call that returns all heads, by a connected client. The floor of loading is to load as
many plain asset specs. Rates are journals per second, so a constant rate over the sizes means linear growth.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._serdes import serialize_value

from benchmarks.runner import Figure, measure_pairs
from coranto.client import SyncJournalClient
from coranto.client.heads import Heads
from coranto.client.values import JournalInfo
from coranto.cluster import EmbeddedCluster
from coranto.coordination.etcd import MAX_TXN_OPS, Op, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.labels import label_selector
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import (
    JournalGroup,
    JournalResource,
    build_journal_asset_specs,
    build_journal_observation_sensor,
    build_journal_polling_sensor,
)

SIZES = (100, 1_000, 10_000)
WRITTEN = 100
"""The number of new journals of each size that have content."""
LIVE = 1_000
"""The number of journals that the broker serves, about the default limit of one broker. Others are suspended."""
TIMEOUT_SECONDS = 600.0
"""The assignment of new journals takes long on a busy machine."""


@dg.job
def consume() -> None: ...


def _name(number: int) -> str:
    return f"bench/region-{number % 10}/part-{number:05}"


def _create(cluster: EmbeddedCluster, client: SyncJournalClient, first: int, end: int) -> None:
    """Create journals with these numbers in etcd, and wait until the broker returns the heads of all of them."""
    layout = Layout(cluster.info.etcd_prefix)
    ops: list[Op] = []
    for number in range(first, end):
        fragment = pb.JournalSpec.Fragment(length=1 << 20, compression_codec=pb.NONE, stores=["file:///"])
        fragment.refresh_interval.FromSeconds(3_600)
        spec = pb.JournalSpec(name=_name(number), replication=1, fragment=fragment)
        if number >= LIVE:
            spec.suspend.level = pb.JournalSpec.Suspend.FULL
            spec.suspend.offset = 100 if number - first < WRITTEN else 0
        ops.append(Put(layout.item_key(spec.name), spec.SerializeToString()))

    async def put() -> None:
        async with EtcdCoordinator(cluster.info.etcd) as coordinator:
            for begin in range(0, len(ops), MAX_TXN_OPS):
                await coordinator.txn([], ops[begin : begin + MAX_TXN_OPS])

    asyncio.run(put())
    # A broker first lists each journal's store, and calls wait for that.
    while not _are_complete(client.heads("name:prefix=bench/"), end):
        time.sleep(0.5)


def _are_complete(heads: Heads, count: int) -> bool:
    return len(heads) == count and all(each.known and (each.listed or each.suspended) for each in heads)


def _rate(count: int, work: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        begun = time.perf_counter()
        work()
        return count / (time.perf_counter() - begun)

    return once


def _evaluated(
    sensor: dg.SensorDefinition, instance: dg.DagsterInstance, repository: dg.RepositoryDefinition
) -> SensorExecutionData:
    """Evaluate a sensor without a cursor."""
    context = dg.build_sensor_context(instance=instance, repository_def=repository, sensor_name=sensor.name)
    return sensor.evaluate_tick(context)


def _tick(sensor: dg.SensorDefinition, instance: dg.DagsterInstance, repository: dg.RepositoryDefinition) -> None:
    """Evaluate a sensor without a cursor, and store its events, as the daemon does."""
    for event in _evaluated(sensor, instance, repository).asset_events:
        instance.report_runless_asset_event(event)


def _processor_seconds(
    sensor: dg.SensorDefinition, instance: dg.DagsterInstance, repository: dg.RepositoryDefinition
) -> float:
    """Return the processor time of a tick, without the broker's. Other load on the machine does not affect it."""
    begun = time.process_time()
    _tick(sensor, instance, repository)
    used = time.process_time() - begun
    _forget(instance)
    return used


def _state(
    sensor: dg.SensorDefinition, what: str, instance: dg.DagsterInstance, repository: dg.RepositoryDefinition
) -> str:
    """Describe the state that Dagster keeps after a tick: the size of the one cursor, and of the permanent events."""
    result = _evaluated(sensor, instance, repository)
    if len(result.run_requests or ()) + len(result.asset_events) != 1:
        raise AssertionError(f"the {what} sensor did not return exactly one run request or event")
    events = sum(len(serialize_value(event)) for event in result.asset_events)
    return f"Dagster keeps a cursor of {len(result.cursor or ''):,} bytes, and {events:,} bytes of events a report"


def _load_journals(listed: Sequence[JournalInfo]) -> dg.RepositoryDefinition:
    return dg.Definitions(assets=build_journal_asset_specs(listed)).get_repository_def()


def _load_plain(listed: Sequence[JournalInfo]) -> dg.RepositoryDefinition:
    specs = [dg.AssetSpec(each.name.split("/"), kinds={"journal"}) for each in listed]
    return dg.Definitions(assets=specs).get_repository_def()


def run(rounds: int) -> list[Figure]:
    figures = []
    group = JournalGroup("bench")
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder), lease_seconds=120, etcd_fsync=False) as cluster,
    ):
        resource = JournalResource(data_dir=folder)
        polling = build_journal_polling_sensor(journals=resource, group=group, job=consume)
        observing = build_journal_observation_sensor(journals=resource, groups=[group])
        repository = dg.Definitions(jobs=[consume], sensors=[polling, observing]).get_repository_def()
        config = replace(resource.client_config(), retry_timeout=TIMEOUT_SECONDS)
        with SyncJournalClient.of(config) as client, dg.instance_for_test() as instance:
            made = 0
            for size in SIZES:
                _create(cluster, client, made, size)
                for number in range(made, min(LIVE, made + min(WRITTEN, size - made))):
                    client.append(_name(number), b"x" * 100)
                made = size
                call = _rate(size, lambda: client.heads(group.selector))
                for sensor, what in ((polling, "polling"), (observing, "observing")):
                    note = _state(sensor, what, instance, repository)
                    note += f"; a tick takes {_processor_seconds(sensor, instance, repository):.2f} s of a processor"
                    tick = _rate(size, lambda sensor=sensor: _tick(sensor, instance, repository))  # type: ignore[misc]
                    rates, floors = measure_pairs(rounds, call, tick)
                    seconds = size / statistics.median(rates)
                    figures.append(
                        Figure(
                            f"tick of the {what} sensor, {size:,} journals ({seconds:.2f} s)",
                            "journals/s",
                            rates,
                            floors,
                            "the call for all heads, alone",
                            note,
                        )
                    )
                    _forget(instance)
                listed = client.list(label_selector(include={"name:prefix": f"{group.name}/"})).journals
                rates, floors = measure_pairs(
                    rounds,
                    _rate(size, lambda listed=listed: _load_plain(listed)),  # type: ignore[misc]
                    _rate(size, lambda listed=listed: _load_journals(listed)),  # type: ignore[misc]
                )
                seconds = size / statistics.median(rates)
                figures.append(
                    Figure(
                        f"definitions of {size:,} journals ({seconds:.2f} s)",
                        "journals/s",
                        rates,
                        floors,
                        "as many plain asset specs",
                    )
                )
    return figures


def _forget(instance: dg.DagsterInstance) -> None:
    """Delete all reported events, so that the next tick reports them again."""
    instance.wipe_assets(list(instance.all_asset_keys()))
