"""Processes of an ingest that are killed at random moments."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable
from pathlib import Path

from coranto.client import JournalClient
from coranto.streams.model.stream import transactions_journal
from tests.platform.ingest.lists import until

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]


async def grown(client: JournalClient, stream: str) -> None:
    """Return once another batch is decided."""
    journal = transactions_journal(stream)
    before = await client.head(journal)

    async def has_grown() -> bool:
        return await client.head(journal) > before

    await until(has_grown)


async def live(file: Path, endpoint: str, moment: Awaitable[object] | None, *options: str) -> int | None:
    """Run a process of the ingest, and kill it at a moment. Returns its exit code, or None if it was killed."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("ingest", "run", str(file), "--endpoint", endpoint, *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    ended = asyncio.ensure_future(process.communicate())
    if moment is not None:
        await asyncio.wait([ended, asyncio.ensure_future(moment)], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            process.kill()
            await ended
            return None
    _, errors = await ended
    assert process.returncode == 0, errors.decode()
    return process.returncode


async def moment(client: JournalClient, stream: str, chance: random.Random) -> None:
    """Return at a random moment: while a process starts, or after a batch was decided."""
    seconds = chance.uniform(0, 0.5)
    if chance.random() < 0.75:
        await grown(client, stream)
    await asyncio.sleep(seconds)
