"""`coranto consumer lag`: how far a consumer is behind its journals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import Output, print_table
from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto_consumers.cli.arguments import Consumer, ConsumerName, StoreOrNone
from coranto_consumers.positions.lag import JournalLag, lag_of, selector_of
from coranto_consumers.stores.reading import read_checkpoint

_UNKNOWN = "-"


def lag(
    name: ConsumerName,
    store: StoreOrNone = None,
    interval: Annotated[
        float,
        typer.Option("--interval", min=0, help="Measure twice, this many seconds apart, and show the read rate."),
    ] = 0.0,
    consumer: Consumer = None,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Show how far a consumer is behind: positions, heads, and the bytes and messages in between.

    MESSAGES begins with ~ if it is estimated from the size of the first messages. AGE is the age of the first unread
    message, and WRITTEN/S the bytes per second that were written since. Without a store, NAME is a shard of --consumer,
    such as a shard with a recovery log.
    """

    async def work(client: JournalClient) -> tuple[list[JournalLag], dict[str, float]]:
        offsets, sources = await _position(name, store, consumer)
        if not interval:
            return await lag_of(client, offsets, sources), {}
        began = time.monotonic()
        await asyncio.sleep(interval)
        now, sources = await _position(name, store, consumer)
        seconds = time.monotonic() - began
        read = {journal: (at - offsets.get(journal, 0)) / seconds for journal, at in now.items()}
        return await lag_of(client, now, sources), read

    lags, read = with_client(endpoint, work)
    if output is Output.JSON:
        documents = [
            {**asdict(each), "written_per_second": each.written_per_second, "read_per_second": read.get(each.journal)}
            for each in lags
        ]
        typer.echo(json.dumps(documents, indent=2))
        return
    print_lags(name, lags, read)


def print_lags(name: str, lags: Sequence[JournalLag], read: Mapping[str, float]) -> None:
    """Print the lag of a consumer in each journal, and the total. `read` has the measured read rates, if any."""
    columns = ["JOURNAL", "POSITION", "HEAD", "BEHIND", "MESSAGES", "AGE", "WRITTEN/S", *(["READ/S"] if read else [])]
    print_table([*columns, ""], [_row(each, read) for each in lags])
    behind = sum(each.behind or 0 for each in lags)
    counted = [each.messages for each in lags if each.messages is not None]
    about = "about " if len(counted) < len(lags) or any(each.is_estimate for each in lags) else ""
    typer.echo(f"\n{name}: {behind:,} bytes and {about}{sum(counted):,} messages behind, in {len(lags)} journals")


async def _position(name: str, store: str | None, consumer: str | None) -> tuple[Mapping[str, int], str]:
    """Return the offsets of a consumer, and the label selector of its sources (empty if it is not known)."""
    if store is None:
        return await _position_of_shard(name, consumer), ""
    found = await asyncio.to_thread(read_checkpoint, store, name)
    if found is None:
        raise InvalidInput(f"consumer {name!r} has no checkpoint in the store", field="NAME")
    return found.checkpoint.offsets, selector_of(found.checkpoint.identity.sources)


async def _position_of_shard(name: str, consumer: str | None) -> Mapping[str, int]:
    from coranto_consumers.cli.shards import consumer_client  # Not needed with a store.

    async with consumer_client(consumer) as client:
        shard = next((each for each in await client.list(f"id={name}")), None)
        if shard is None:
            raise InvalidInput(f"there is no shard {name}; `coranto shards list` shows all", field="NAME")
        read = (await client.stat(name)).read_through
        return {source.journal: read.get(source.journal, 0) for source in shard.spec.sources}


def _row(lag: JournalLag, read: Mapping[str, float]) -> Sequence[str]:
    messages = _text(lag.messages)
    return [
        lag.journal,
        _text(lag.position),
        _text(lag.head),
        _text(lag.behind),
        f"~{messages}" if lag.is_estimate else messages,
        _UNKNOWN if lag.seconds is None else f"{lag.seconds:.1f}s",
        _text(lag.written_per_second),
        *([_text(read.get(lag.journal))] if read else []),
        lag.problem,
    ]


def _text(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}"
