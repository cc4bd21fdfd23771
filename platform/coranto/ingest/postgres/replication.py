"""A connection of PostgreSQL's replication protocol: it creates slots, and receives changes. All calls block.

psycopg has no interface for the protocol, so this module uses psycopg's wrapper of libpq.
"""

from __future__ import annotations

import select
import struct
import time
from typing import Any, Final

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

from coranto.errors import Unavailable
from coranto.ingest.postgres.pgoutput import format_lsn, parse_lsn
from coranto.ingest.postgres.server import CONNECT_SECONDS, connect, failures, problem_of

_REPORT_SECONDS: Final = 10.0
_REPORT_MESSAGES: Final = 4096
_STATUS: Final = struct.Struct(">cqqqqB")
_KEEPALIVE: Final = struct.Struct(">qqB")
_DATA_HEAD: Final = 25
_EPOCH: Final = 946_684_800
"""The seconds from 1970 to 2000, where PostgreSQL's times begin."""


class ReplicationConnection:
    """A connection for replication commands. One command runs at a time."""

    def __init__(self, url: str) -> None:
        self._connection = connect(url, replicates=True)
        self._libpq = self._connection.pgconn
        self.timeline = 0
        """The timeline of the server's log, known after `identity`."""
        self.reached = 0
        """All changes before this position in the log are received."""
        self.confirmed = 0
        """The server may remove changes before this position."""
        self.is_asked = False
        """True if the server waits for a report, as before it stops."""
        self._reported = (0, 0.0)
        self._received = 0

    @property
    def pid(self) -> int:
        """The id of the server's process for this connection."""
        return int(self._libpq.backend_pid)

    def identity(self) -> str:
        """Return the database system's id and the name of the database."""
        with failures():
            row = self._connection.execute("IDENTIFY_SYSTEM").fetchone()
        assert row is not None
        self.timeline = int(row[1])
        return f"{row[0]}/{row[3]}"

    def end_of_timeline(self, timeline: int) -> int:
        """Return the position where the server's log left an earlier timeline; 0 if it never had that timeline."""
        if timeline > self.timeline:
            return 0
        with failures():
            row = self._connection.execute(f"TIMELINE_HISTORY {self.timeline}").fetchone()
        assert row is not None
        content = row[1].decode() if isinstance(row[1], bytes) else str(row[1])
        for line in content.splitlines():
            parent, _, rest = line.partition("\t")
            if parent.strip() == str(timeline):
                return parse_lsn(rest.partition("\t")[0])
        return 0

    def create_slot(self, name: str, *, temporary: bool) -> None:
        """Start to create a slot, which first waits for running write transactions. `created` returns the result.

        A temporary slot also exports a snapshot: the rows at the position where the slot begins.
        """
        kind, what = ("TEMPORARY ", "EXPORT_SNAPSHOT") if temporary else ("", "NOEXPORT_SNAPSHOT")
        command = f'CREATE_REPLICATION_SLOT "{name}" {kind}LOGICAL pgoutput {what}'
        with failures():
            self._libpq.send_query(command.encode())

    def created(self, seconds: float) -> tuple[str, str] | None:
        """Return the position and the snapshot of the created slot; None if it is not created within `seconds`."""
        with failures():
            row = self._result(seconds)
        return None if row is None else (str(row[1]), str(row[2]))

    def start(self, slot: str, position: int, publication: str) -> None:
        """Start receiving the changes that are committed from a position on."""
        names = publication.replace('"', '""').replace("'", "''")
        options = f'"proto_version" \'1\', "publication_names" \'"{names}"\''
        command = f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(position)} ({options})'
        with failures():
            self._libpq.send_query(command.encode())
            if self._result(CONNECT_SECONDS) is None:
                raise Unavailable("the server does not begin to send changes")
        self.confirmed = position

    def _result(self, seconds: float) -> list[str] | None:
        deadline = time.monotonic() + seconds
        self._libpq.flush()
        while self._libpq.is_busy():
            if not self._wait(deadline - time.monotonic()):
                return None
            self._libpq.consume_input()
        result = self._libpq.get_result()
        assert result is not None
        if result.status == ExecStatus.COPY_BOTH:
            return []
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise error_from_result(result)
        while self._libpq.get_result() is not None:
            pass
        return [(result.get_value(0, at) or b"").decode() for at in range(result.nfields)]

    def receive(self, deadline: float) -> bytes | None:
        """Return the next message; None if none arrives before `deadline`, a monotonic time. Reports when due."""
        try:
            while True:
                size, content = self._libpq.get_copy_data(1)
                if size > 0 and content[0] == 0x77:  # w
                    self._received += 1
                    if self._received % _REPORT_MESSAGES == 0:
                        self._report_if_due()
                    return content[_DATA_HEAD:].tobytes()
                if size > 0 and content[0] == 0x6B:  # k
                    end, _, wants_reply = _KEEPALIVE.unpack_from(content, 1)
                    self.reached = max(self.reached, end)
                    if wants_reply:
                        self.is_asked = True
                        self.report()
                elif size < 0:
                    self._ended()
                elif size == 0:
                    self._report_if_due()
                    if not self._wait(deadline - time.monotonic()):
                        return None
                    self._libpq.consume_input()
        except psycopg.Error as error:
            raise problem_of(error) from error

    def _report_if_due(self) -> None:
        if self._reported[0] != self.confirmed or time.monotonic() - self._reported[1] > _REPORT_SECONDS:
            self.report()

    def report(self, *, ask: bool = False) -> None:
        """Report the confirmed position to the server. With `ask`, the server answers with its own position."""
        with failures():
            now = int((time.time() - _EPOCH) * 1_000_000)
            written = max(self.reached, self.confirmed)
            status = _STATUS.pack(b"r", written, self.confirmed, self.confirmed, now, ask)
            if self._libpq.put_copy_data(status) == 1:
                self._reported = self.confirmed, time.monotonic()
            self._libpq.flush()

    def close(self) -> None:
        self._connection.close()

    def _ended(self) -> None:
        result = self._libpq.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result)
        raise psycopg.OperationalError("the server has ended the stream of changes")

    def _wait(self, seconds: float) -> bool:
        """Wait until the server has sent something. Returns False after a timeout."""
        if seconds <= 0:
            return False
        waiting: Any = select.poll()
        waiting.register(self._libpq.socket, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))
