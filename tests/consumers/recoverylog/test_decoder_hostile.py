"""Content of recovery logs that looks like frames but is garbage."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coranto.client import JournalClient
from coranto.messages.fixed_frame import MAGIC
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.recoverylog import Hints, Player
from coranto_consumers.recoverylog.operations import Create, Fnode, RecordedOperation
from tests.consumers.recoverylog.forged import LOG, forged


async def test_of_fake_frames_only_the_first_is_parsed(
    client: JournalClient, broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each magic word declares a large frame. Parsing all of them would take minutes per MiB."""
    parsed: list[int] = []
    from_payload = RecordedOperation.from_payload

    def counted(payload: bytes, log: str, begin: int, end: int) -> RecordedOperation:
        parsed.append(len(payload))
        return from_payload(payload, log, begin, end)

    monkeypatch.setattr(RecordedOperation, "from_payload", counted)
    length = 1 << 20
    content = (MAGIC + struct.pack("<I", length)) * (length // 4)
    await broker.write(LOG, content)
    fine = forged(Create("/fine"))
    await broker.write(LOG, fine)
    with capture_logs() as logs:
        async with Player(client, Hints(LOG), tmp_path / "played") as player:
            recovery = await player.finish()
    assert recovery.fsm.paths == {"/fine": Fnode(1)}
    assert sum(parsed) <= length + len(fine)
    garbage = [each for each in logs if each["event"] == "recovery_log.garbage"]
    assert 0 < len(garbage) < 1000, "garbage is logged once for each piece that is read"
