"""Ticks of sensors and the loading of definitions, by the number of journals.

The floor of a tick is the one call that tells all heads, by a client that is connected already. The floor of loading is
to load as many plain asset specs. Rates are journals per second, so an even rate over the sizes means linear growth.
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

from benchmarks.runner import Figure, in_turns
from coranto.client import SyncJournalClient
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
"""The journals of each size that have content."""
PATIENCE_SECONDS = 600.0
"""Ten thousand new journals take their time to be assigned."""


@dg.job
def consume() -> None: ...


def _name(number: int) -> str:
    return f"bench/region-{number % 10}/part-{number:05}"


def _create(cluster: EmbeddedCluster, first: int, end: int) -> None:
    """Create journals with these numbers in etcd, so that the broker assigns all of them at once when it starts."""
    layout = Layout(cluster.info.etcd_prefix)
    ops: list[Op] = []
    for number in range(first, end):
        fragment = pb.JournalSpec.Fragment(length=1 << 20, compression_codec=pb.NONE, stores=["file:///"])
        fragment.refresh_interval.FromSeconds(3_600)
        spec = pb.JournalSpec(name=_name(number), replication=1, fragment=fragment)
        ops.append(Put(layout.item_key(spec.name), spec.SerializeToString()))

    async def put() -> None:
        async with EtcdCoordinator(cluster.info.etcd) as coordinator:
            for begin in range(0, len(ops), MAX_TXN_OPS):
                await coordinator.txn([], ops[begin : begin + MAX_TXN_OPS])

    cluster.stop_broker()
    asyncio.run(put())
    cluster.start_broker()


def _fill(client: SyncJournalClient, names: Sequence[str]) -> None:
    """Wait until the broker serves all journals, and append to some."""
    while client.heads("name:prefix=bench/").unknown:
        time.sleep(0.5)
    for name in names:
        client.append(name, b"x" * 100)


def _rate(count: int, work: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        begun = time.perf_counter()
        work()
        return count / (time.perf_counter() - begun)

    return once


def _tick(sensor: dg.SensorDefinition, instance: dg.DagsterInstance, repository: dg.RepositoryDefinition) -> int:
    """Evaluate a sensor that has seen nothing yet, and store what it reports, as the daemon does."""
    context = dg.build_sensor_context(instance=instance, repository_def=repository, sensor_name=sensor.name)
    result = sensor.evaluate_tick(context)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    return len(result.run_requests or ()) + len(result.asset_events)


def _load_journals(listed: Sequence[JournalInfo]) -> dg.RepositoryDefinition:
    return dg.Definitions(assets=build_journal_asset_specs(listed)).get_repository_def()


def _load_plain(listed: Sequence[JournalInfo]) -> dg.RepositoryDefinition:
    specs = [dg.AssetSpec(each.name.split("/"), kinds={"journal"}) for each in listed]
    return dg.Definitions(assets=specs).get_repository_def()


def run(rounds: int) -> list[Figure]:
    figures = []
    group = JournalGroup("bench")
    room = ("--journal-limit", str(max(SIZES)))  # A broker takes 1,024 by default.
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder), lease_seconds=120, etcd_fsync=False, broker_arguments=room) as cluster,
    ):
        resource = JournalResource(data_dir=folder)
        polling = build_journal_polling_sensor(journals=resource, group=group, job=consume)
        observing = build_journal_observation_sensor(journals=resource, groups=[group])
        repository = dg.Definitions(jobs=[consume], sensors=[polling, observing]).get_repository_def()
        config = replace(resource.client_config(), patience=PATIENCE_SECONDS)
        with SyncJournalClient.of(config) as client, dg.instance_for_test() as instance:
            made = 0
            for size in SIZES:
                _create(cluster, made, size)
                _fill(client, [_name(number) for number in range(made, made + min(WRITTEN, size - made))])
                made = size
                call = _rate(size, lambda: client.heads(group.selector))
                for sensor, what in ((polling, "polling"), (observing, "observing")):
                    if _tick(sensor, instance, repository) != 1:
                        raise AssertionError(f"the {what} sensor has nothing to say of {size:,} journals")
                    _forget(instance)
                    tick = _rate(size, lambda sensor=sensor: _tick(sensor, instance, repository))  # type: ignore[misc]
                    rates, floors = in_turns(rounds, call, tick)
                    seconds = size / statistics.median(rates)
                    figures.append(
                        Figure(
                            f"tick of the {what} sensor, {size:,} journals ({seconds:.2f} s)",
                            "journals/s",
                            rates,
                            floors,
                            "the call for all heads, alone",
                        )
                    )
                listed = client.list(label_selector(include={"name:prefix": f"{group.name}/"})).journals
                rates, floors = in_turns(
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
    """Forget what was reported, so that the next tick has as much to say."""
    instance.wipe_assets(list(instance.all_asset_keys()))
