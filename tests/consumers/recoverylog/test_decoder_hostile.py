"""Content of recovery logs that looks like frames and is none."""

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


async def test_what_looks_like_frames_is_passed_over_in_bounded_time(
    client: JournalClient, broker: FakeBroker, tmp_path: Path
) -> None:
    """Each magic word claims a large frame. Looking at all of each would take minutes for every MiB of the log."""
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
    assert 0 < len(garbage) < 1000, "it is told once for each piece that was read"
