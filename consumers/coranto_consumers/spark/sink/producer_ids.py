"""Reuse of producer ids by tasks, so that readers of an output do not have to track a new producer for each task.

Only clocks distinguish a producer's messages. So two attempts must never write under one id at the same time, and an
acknowledgement of an earlier use must never arrive during a later use:

- An id belongs to the executor that created it. The executor's tasks **acquire** ids by renaming files, so that each id
  is acquired by only one task.
- A use of an id is **released** once its transaction has committed, and its acknowledgements are appended, each by a
  single append attempt. Then the id is free again. A failed or losing attempt is never released, so its id is never
  reused.
- Only one instance of a consumer uses a folder, with consecutive fences. After a gap, another instance may append the
  last acknowledgements again at any time, so the instance switches to a new folder.

A consumer's driver keeps the released uses in memory (`ReleasedIds`). Spark plans and commits a query's batch in
different processes, which share released uses in a file per run of the query (`released_pools`, `release`). There, a
use is released once its batch is decided and acknowledged exactly once, and no other process has taken over the batch
(`coranto.publication.batch_ledger`). A restarted query, or a query whose file is lost, begins with new ids.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from pyspark import TaskContext

from coranto.messages.uuids import ProducerClock, ProducerId, clock_to_ns, new_producer_id
from coranto_consumers.spark.session.fetching import executor_folder

_MAX_RELEASED: Final = 1_000
"""The maximum number of released uses that tasks get. The ids of older uses are not reused."""
_TAKEN, _FREE = "taken", "free"
_RUN: Final = "spark.jobGroup.id"
"""The local property with the id of a query's run, which tasks can read."""
_MAX_RUNS: Final = 20

_log = structlog.get_logger(__name__)


class Use(NamedTuple):
    """One use of a producer id, by one attempt of a task."""

    producer: ProducerId
    token: str
    clock: int = 0


class AcquiredId(NamedTuple):
    """A producer id for one attempt of a task."""

    use: Use
    clock: ProducerClock
    """Returns clocks above all earlier uses of the id, even if the executor's clock is behind."""


@dataclass(frozen=True, slots=True)
class IdPool:
    """The producer ids of one instance of a consumer, as far as its driver knows."""

    name: str | None = None
    """The name of the instance's folders. None: all ids are new."""
    released: tuple[Use, ...] = ()

    def acquire(self, folder: Path | None) -> AcquiredId:
        """Return a released id from an executor's folder, or a new id if there is none or the folder is unusable."""
        try:
            found = self._acquire_released(folder / "coranto-producers" / self.name) if folder and self.name else None
        except OSError as error:
            _log.warning("producer.id_not_reused", folder=str(folder), error=str(error))
            found = None
        return found or _acquired(new_producer_id(os.urandom), uuid.uuid4().hex)

    def _acquire_released(self, folder: Path) -> AcquiredId:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for producer, token, clock in self.released:
            # Another task may have freed the id already, or the id belongs to another executor.
            with suppress(FileNotFoundError):
                (folder / f"{_TAKEN}-{producer.hex()}-{token}").rename(folder / f"{_FREE}-{producer.hex()}-{clock}")
        mine = uuid.uuid4().hex
        for path in sorted(folder.glob(f"{_FREE}-*")):
            _, name, clock_text = path.name.split("-")
            with suppress(FileNotFoundError):  # Another task was faster.
                path.rename(folder / f"{_TAKEN}-{name}-{mine}")
                return _acquired(ProducerId(bytes.fromhex(name)), mine, int(clock_text))
        producer = new_producer_id(os.urandom)
        (folder / f"{_TAKEN}-{producer.hex()}-{mine}").touch()
        return _acquired(producer, mine)


def _acquired(producer: ProducerId, token: str, last_clock: int = 0) -> AcquiredId:
    clock = ProducerClock(time.time_ns)
    clock.update(clock_to_ns(last_clock))
    return AcquiredId(Use(producer, token), clock)


@dataclass(slots=True)
class ReleasedIds:
    """The driver's record of the ids that the tasks of one instance may reuse."""

    _fence: int = 0
    _name: str | None = None
    _uses: dict[ProducerId, Use] = field(default_factory=dict)

    def begin(self, fence: int) -> None:
        """Begin a run under a fence. If another instance has raised the fence in between, drop all ids."""
        if fence != self._fence + 1 or not self._name:
            self._name = uuid.uuid4().hex
            self._uses.clear()
        self._fence = fence

    def pool(self) -> IdPool:
        return IdPool(self._name, tuple(self._uses.values()))

    def release(self, uses: Iterable[Use]) -> None:
        """Record uses whose transaction has committed, and whose acknowledgements are appended."""
        self._uses = _latest(self._uses, uses)


def _latest(known: Mapping[ProducerId, Use], uses: Iterable[Use]) -> dict[ProducerId, Use]:
    found = dict(known)
    for use in uses:
        found.pop(use.producer, None)
        found[use.producer] = use
    return dict(list(found.items())[-_MAX_RELEASED:])


def run_of_task() -> str | None:
    """Return the id of the query run of this task. None outside of queries."""
    context = TaskContext.get()
    run = (context.getLocalProperty(_RUN) if context is not None else None) or ""
    return run if run.replace("-", "").isalnum() else None  # It is used in file names.


def released_pools() -> dict[str, IdPool]:
    """Return the ids that tasks of the latest runs may reuse, by run. Deletes the files of older runs."""
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


def release(run: str | None, uses: Iterable[Use]) -> None:
    """Record released uses of a run."""
    folder = _folder()
    if folder is None or run is None:
        return
    path = folder / f"{run}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = _load(path) if path.exists() else {}
        text = json.dumps([[each.producer.hex(), *each[1:]] for each in _latest(known, uses).values()])
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
