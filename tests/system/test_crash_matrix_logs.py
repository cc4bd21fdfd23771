"""The crash matrix of stores in recovery logs: as `test_crash_matrix`, and at each step of taking over the log.

An append to the log contains the fence check and the commit. So it is also stopped within: after the fence check,
before the content is sent, and after the content, before the end of the append.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coranto.coordination.etcd import Delete, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.labels import RECOVERY_LOG
from coranto_consumers.recoverylog.hint_store import HintKeys, HintStore
from coranto_consumers.recoverylog.player import Player
from tests.sampling import PARTS, part_of
from tests.system.crash_matrix_control import RESUME
from tests.system.test_crash_matrix import half_of

pytestmark = pytest.mark.timeout(900)

STEPS = ("read", "consume", "publish", "flush", "record", "fence", "commit", "hint", "ack1", "ack2")
TAKEOVER = ("claim", "handoff", "confirm", "backup", "hint1")
"""Steps of the takeover in a second life, because at first there are no hints."""
POINTS = [f"{step}.{side}" for step in (*STEPS, *TAKEOVER) for side in ("before", "after")]
POINTS_OF = {
    "sqlite-file": POINTS,
    # Steps that do not concern the store are covered by the other kind.
    "json": [point for point in POINTS if point.startswith(("flush", "record", "fence", "commit", "hint."))],
}
EVERY = [(n, 1) for n in range(1, 7)]


class LogCell:
    """One cell: a shard with its recovery log, its assignment in etcd, and its successive processes."""

    def __init__(self, matrix: Any, etcd: EtcdCoordinator, folder: Path, kind: str, point: str, dies: bool) -> None:
        self.name = f"{kind}-{point}-{'killed' if dies else 'zombie'}"
        self._matrix = matrix
        self._etcd = etcd
        self._folder = folder / self.name
        self._kind = kind
        self._point = point
        self._dies = dies
        self._lives = itertools.count()
        self._keys = HintKeys("/matrix/hints", self.name, 1)
        self._assignment = f"/matrix/assignments/{self.name}"
        self._input, self._log = f"{self.name}/in", f"{self.name}/log"
        self._outputs = [f"{self.name}/out-a", f"{self.name}/out-b"]

    async def run(self) -> None:
        matrix = self._matrix
        await matrix.create(self._input, *self._outputs)
        await matrix.create(self._log, content_type=RECOVERY_LOG)
        at_takeover = self._point.partition(".")[0] in TAKEOVER
        old = await (self._stop_at_takeover() if at_takeover else self._stop_in_second_transaction())

        new = await self._start()
        await new.expect("restoring")
        await new.expect("restored")
        hints = await self._hints()
        if not self._dies:
            old.send(RESUME)
        last = await matrix.publish(self._input, 6)
        if not self._dies:
            committed = not at_takeover and POINTS.index(self._point) >= POINTS.index("commit.after")
            # It may report its progress first. Then it processes the last message.
            while await old.expect("restored" if at_takeover else "read", "fenced") != "fenced":
                assert committed or at_takeover
                old.send(last)
        new.send(last)
        await new.expect("read")
        new.send("finish")
        await new.expect("finished")
        old.close()
        new.close()

        assert await self._hints() == hints, "a former owner has stored hints"
        assert await self._counted() == EVERY
        for journal in self._outputs:
            assert await matrix.read_committed(journal) == list(range(1, 7))

    async def _stop_in_second_transaction(self) -> Any:
        old = await self._start(point=self._point, dies=self._dies)
        await old.expect("restoring")
        await old.expect("restored")
        old.send(await self._matrix.publish(self._input, 1, 2))
        await old.expect("read")
        old.send(await self._matrix.publish(self._input, 3, 4, 5))
        await old.expect("" if self._dies else "stopped")
        return old

    async def _stop_at_takeover(self) -> Any:
        first = await self._start()
        await first.expect("restoring")
        await first.expect("restored")
        first.send(await self._matrix.publish(self._input, 1, 2))
        await first.expect("read")
        first.send("finish")
        await first.expect("finished")
        first.close()
        old = await self._start(point=self._point, dies=self._dies, at_takeover=True)
        await old.expect("restoring")
        await old.expect("" if self._dies else "stopped")
        await self._matrix.publish(self._input, 3, 4, 5)
        return old

    async def _start(self, **how: Any) -> Any:
        """Assign the shard to a new process only, as the allocator would."""
        await self._etcd.txn([], [Delete(self._assignment)])
        assigned = (await self._etcd.txn([], [Put(self._assignment, b"")])).header.revision
        return await self._matrix.workers.start(
            {
                "kind": self._kind,
                "cell": self.name,
                "endpoint": self._matrix.client.config.endpoint,
                "etcd": self._matrix.etcd,
                "input": self._input,
                "outputs": self._outputs,
                "log": self._log,
                "hints": self._keys.prefix,
                "assignment": self._assignment,
                "assigned": assigned,
                "folder": str(self._folder / str(next(self._lives))),
                **how,
            }
        )

    async def _hints(self) -> Any:
        return await HintStore(self._etcd, self._keys).fetch()

    async def _counted(self) -> list[tuple[int, int]]:
        """Return the store's counts in the log."""
        folder = self._folder / "recovered"
        async with Player(self._matrix.client, (await self._hints()).pick(self._log), folder) as player:
            await player.finish()
            if self._kind == "json":
                state = json.loads((folder / "state.json").read_text().splitlines()[1])
                return sorted((int(n), count) for n, count in state.items())
            with closing(sqlite3.connect(folder / "store.db")) as database:
                return database.execute("SELECT n, count FROM counts ORDER BY n").fetchall()


@PARTS
@pytest.mark.parametrize("kind", POINTS_OF)
async def test_a_stop_at_any_step_keeps_exactly_once(kind: str, part: str, matrix: Any, tmp_path: Path) -> None:
    points = POINTS_OF[kind]
    async with EtcdCoordinator(matrix.etcd) as etcd:
        cells = [
            LogCell(matrix, etcd, tmp_path, kind, point, dies)
            for point, dies in part_of(part, itertools.product(points, (True, False)), half_of(points))
        ]
        assert len(cells) == len(points)
        await matrix.run({cell.name: partial(cell.run) for cell in cells})
