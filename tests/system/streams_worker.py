"""A program that writes units to a stream and reports each step in a line. It may be killed at any time.

The job is JSON on the command line: `endpoint`, `stream`, `writer` (its id), `pause` in seconds, and `units` as
`[number, key, [event, …], is a transaction]`. Lines are `["give", unit, time]`, `["ok", unit, time, segment, begin,
end, deduplicated]` and `["failed", unit, time, outcome, error]`, in monotonic seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import structlog

from coranto.client import JournalClient
from coranto.errors import CorantoError
from coranto.streams.writer.stream_writer import StreamWriter

WINDOW = 12


def say(*words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def work(job: dict[str, Any]) -> bool:
    """Write the units, and return True if all are durable."""
    failed = False

    async def settle(number: int, done: asyncio.Future[Any]) -> None:
        nonlocal failed
        try:
            result = await done
        except CorantoError as error:
            failed = True
            say("failed", number, time.monotonic(), error.outcome.value, f"{type(error).__name__}: {error}")
            return
        say("ok", number, time.monotonic(), result.segment, result.begin, result.end, result.deduplicated)

    async with JournalClient(job["endpoint"], retry_timeout=180) as client:
        writer: StreamWriter[Any] = StreamWriter(client, job["stream"], writer_id=job["writer"], in_flight=4)
        async with writer:
            waiting: set[asyncio.Task[None]] = set()
            for number, key, events, is_transaction in job["units"]:
                while len(waiting) >= WINDOW:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if failed:
                    break
                say("give", number, time.monotonic())
                done: asyncio.Future[Any]
                if is_transaction:
                    done = writer.write_events(key, events, sequence=number)
                else:
                    done = writer.write_event(key, events[0], sequence=number)
                task = asyncio.ensure_future(settle(number, done))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                await asyncio.sleep(job["pause"])
            if waiting:
                await asyncio.wait(waiting)
    return not failed


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.exit(0 if asyncio.run(work(json.loads(sys.argv[1]))) else 1)
