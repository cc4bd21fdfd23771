"""Content of recovery logs that looks like frames but is garbage."""

from __future__ import annotations

import struct
import time
from pathlib import Path

from structlog.testing import capture_logs

from coranto.client import JournalClient
from coranto.messages.fixed_frame import MAGIC
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.recoverylog import Hints, Player
from coranto_consumers.recoverylog.operations import Create, Fnode
from tests.consumers.recoverylog.forged import LOG, forged


async def test_fake_frames_are_skipped_in_bounded_time(
    client: JournalClient, broker: FakeBroker, tmp_path: Path
) -> None:
    """Each magic word declares a large frame. Scanning each frame completely would take minutes per MiB."""
    length = 1 << 20
    content = (MAGIC + struct.pack("<I", length)) * (length // 4)
    await broker.write(LOG, content)
    await broker.write(LOG, forged(Create("/fine")))
    began = time.process_time()
    with capture_logs() as logs:
        async with Player(client, Hints(LOG), tmp_path / "played") as player:
            recovery = await player.finish()
    assert recovery.fsm.paths == {"/fine": Fnode(1)}
    assert time.process_time() - began < 10
    garbage = [each for each in logs if each["event"] == "recovery_log.garbage"]
    assert 0 < len(garbage) < 1000, "garbage is logged once for each piece that is read"
