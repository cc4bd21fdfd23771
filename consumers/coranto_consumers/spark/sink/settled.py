"""Producer ids that the tasks of a streaming query use again, batch after batch.

The rules of `producer_ids.py` apply. Its driver is a process that lives as long as a consumer. Here, Spark starts a
process to plan a batch, and another one to commit it, so they share the settled uses in files of the driver's folder,
one for each run of a query. A use is settled once its batch is decided, its acknowledgements are appended once, and no
other process has taken the batch over (`coranto.publication.batch_ledger`). A query that restarts is another run, and
begins with new ids.

A file that is lost costs new ids, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import structlog
from pyspark import TaskContext

from coranto.messages.uuids import ProducerId
from coranto_consumers.spark.journals.fetching import executor_folder
from coranto_consumers.spark.sink.producer_ids import IdPool, Use

_RUN: Final = "spark.jobGroup.id"
"""Spark's name of a query's run, where tasks see it."""
_MAX_RUNS: Final = 20
_MAX_USES: Final = 1_000

_log = structlog.get_logger(__name__)


def run_of_task() -> str:
    """Return the id of the run of a query that this task is part of; empty if there is none."""
    context = TaskContext.get()
    run = (context.getLocalProperty(_RUN) if context is not None else None) or ""
    return run if run.replace("-", "").isalnum() else ""  # It names files.


def settled_pools() -> dict[str, IdPool]:
    """Return the ids that tasks of the latest runs may use again, by run. For the process that plans a batch."""
    folder = _folder()
    if folder is None:
        return {}
    try:
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-_MAX_RUNS]:
            path.unlink(missing_ok=True)
        return {path.stem: IdPool(path.stem, tuple(_load(path).values())) for path in files[-_MAX_RUNS:]}
    except (OSError, ValueError) as error:
        _log.warning("producer.id_not_reused", folder=str(folder), error=str(error))
        return {}


def pool_of(run: str, pools: Mapping[str, IdPool]) -> IdPool:
    """Return the ids of a run. Those of a run that is not known yet are new."""
    return pools.get(run) or IdPool(run)


def settle(run: str, uses: Iterable[Use]) -> None:
    """Note settled uses of a run. For the process that commits a batch."""
    folder = _folder()
    if folder is None or not run:
        return
    path = folder / f"{run}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = _load(path) if path.exists() else {}
        for use in uses:
            known.pop(use.producer, None)
            known[use.producer] = use
        text = json.dumps([[use.producer.hex(), use.token, use.clock] for use in list(known.values())[-_MAX_USES:]])
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
    except (OSError, ValueError) as error:
        _log.warning("producer.id_not_reused", folder=str(folder), error=str(error))


def _folder() -> Path | None:
    folder = executor_folder()
    return folder and folder / "coranto-settled"


def _load(path: Path) -> dict[ProducerId, Use]:
    uses = [Use(ProducerId(bytes.fromhex(name)), token, clock) for name, token, clock in json.loads(path.read_text())]
    return {use.producer: use for use in uses}
