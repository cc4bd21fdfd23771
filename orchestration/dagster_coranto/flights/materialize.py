"""Materialise the flights' assets in this process: `python -m dagster_coranto.flights.materialize JOB [ASSET …]`.

The cluster, Dagster's home and the store come only from $CORANTO_DATA, $DAGSTER_HOME and $CORANTO_STORE_URL. So any
process can start, kill and restart this command. Its runs appear in Dagster's UI like any other run. A killed run
cannot mark itself as failed, so the next run does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import dagster as dg
import sqlalchemy as sa

from coranto.cluster.info import process_start
from coranto.effects import LocalDisk
from coranto.errors import InvalidInput
from coranto.telemetry import configure_logging
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from coranto_flights import names
from coranto_flights.names import TABLE
from dagster_coranto.flights.config import TRANSACTION_BYTES, store_url
from dagster_coranto.resources.journals import JournalResource

__all__ = ["Job", "consumer_name", "drop_recorded_data", "main", "materialize", "store_url"]

_PID: Final = "coranto/pid"
_STARTED: Final = "coranto/process-start"
_KEPT: Final = "flights-kept.jsonl"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: the prefix of its journals, its table, the number of flights (0: all), and the size of transactions.

    With `lake`, all flights also go into an Iceberg table.
    """

    prefix: str = ""
    table: str = TABLE
    limit: int = 0
    max_transaction_bytes: int = TRANSACTION_BYTES
    lake: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job from a text of `to_json`. Raises InvalidInput."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{text!r} is not a job: {error}; pass a text of `to_json`", field="job") from error

    @property
    def run_config(self) -> dict[str, Any]:
        """The job as Dagster's run configuration."""
        settings = asdict(self)
        prefix = settings.pop("prefix")
        del settings["lake"]
        return {"resources": {"journals": {"config": {"prefix": prefix}}, "flights": {"config": settings}}}


def consumer_name(job: Job) -> str:
    """Return the name of the job's consumer in the store."""
    return names.consumer_name(job.prefix)


def materialize(job: Job, selection: Sequence[str] = (), *, log_level: str = "INFO") -> bool:
    """Materialise assets (such as `flights/events`; by default all). Returns True if all of them succeed."""
    if job.lake:
        from dagster_coranto.flights.lake import defs
    else:
        from dagster_coranto.flights.definitions import defs

    record_job(job, JournalResource().located_data_dir())
    keys = [dg.AssetKey.from_user_string(name) for name in selection]
    run_config = {**job.run_config, "loggers": {"console": {"config": {"log_level": log_level}}}}
    with dg.DagsterInstance.get() as instance:
        fail_abandoned_runs(instance)
        result = defs.resolve_job_def("flights").execute_in_process(
            run_config=run_config,
            instance=instance,
            asset_selection=keys or None,
            tags={_PID: str(os.getpid()), _STARTED: process_start(os.getpid())},
            raise_on_error=False,
        )
    return result.success


def fail_abandoned_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs of this module as failed if their process is gone. Returns their ids."""
    under_way = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING])
    abandoned = []
    for run in instance.get_runs(under_way):
        pid, started = run.tags.get(_PID), run.tags.get(_STARTED)
        if pid is not None and process_start(int(pid)) != started:
            instance.report_run_failed(run, f"Process {pid} of this run was killed.")
            abandoned.append(run.run_id)
    return abandoned


def record_job(job: Job, data_dir: Path) -> None:
    """Record the store, consumer and table of a job below `data_dir`, without passwords, for `drop_recorded_data`."""
    line = json.dumps({"store": SqlStore(store_url(data_dir)).name, "consumer": consumer_name(job), "table": job.table})
    path = data_dir / _KEPT
    known = path.read_text().splitlines() if path.exists() else []
    if line not in known:
        LocalDisk().write_atomic(path, "".join(f"{each}\n" for each in [*known, line]).encode())


def drop_recorded_data(data_dir: Path) -> None:
    """Drop tables and checkpoints of earlier runs over the cluster in `data_dir` from the store of `store_url`.

    Call this before you remove `data_dir`: checkpoints of deleted journals are useless.
    """
    path = data_dir / _KEPT
    if not path.exists():
        return
    store = SqlStore(store_url(data_dir))
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    with store.engine.begin() as connection:
        for entry in kept:
            if entry["store"] != store.name:
                continue
            sa.Table(entry["table"], sa.MetaData()).drop(connection, checkfirst=True)
            if sa.inspect(connection).has_table(CHECKPOINTS.name):
                connection.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.shard_fqn == entry["consumer"]))
    path.unlink()


def main(arguments: Sequence[str]) -> int:
    """Run the command. The exit code is 0 when every asset was materialised and every check passed."""
    configure_logging("info")
    # Log lines would break a progress bar.
    level = "WARNING" if sys.stderr.isatty() else "INFO"
    try:
        job = Job.from_json(arguments[0]) if arguments else Job()
        return 0 if materialize(job, arguments[1:], log_level=level) else 1
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
