"""`coranto consumer reset` and `skip`: an operator moves a consumer to other positions in its journals."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.offsets import load_offsets
from coranto.cli.journals.times import parse_time
from coranto.cli.output import print_table
from coranto.client import JournalClient
from coranto.client.moments import require_past
from coranto.errors import InvalidInput
from coranto.messages import Checkpoint
from coranto.offsets import vector_of_json
from coranto_consumers.cli.arguments import ConsumerName, Store
from coranto_consumers.positions.moves import EARLIEST, LATEST, Move, Target, apply_moves, plan_moves
from coranto_consumers.stores.changing import change_checkpoint
from coranto_consumers.stores.reading import read_checkpoint

_OPTION = "--to"
_SHORTEST_TIME = 9
"""The minimum number of digits of Unix seconds."""

Journals = Annotated[
    list[str] | None,
    typer.Option(
        "--journal",
        help="Only this journal. May be repeated. Default: all journals in the checkpoint.",
        show_default=False,
    ),
]
Sources = Annotated[
    str,
    typer.Option(
        "--sources",
        help="Label selector of the consumer's journals, to include unread journals. A new consumer needs it.",
        show_default=False,
    ),
]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation. Required in scripts.")]
To = Annotated[
    str,
    typer.Option(
        _OPTION,
        help="`earliest`, `latest`, a time (ISO 8601, Unix seconds, or an age such as `24h`), JOURNAL=OFFSET (several "
        "with commas), or a file of offsets as `coranto consumer offsets` prints them.",
        show_default=False,
    ),
]


def reset(
    name: ConsumerName,
    to: To,
    store: Store,
    journal: Journals = None,
    sources: Sources = "",
    yes: Sure = False,
    endpoint: Endpoint = None,
) -> None:
    """Move a consumer to other positions, so that it repeats or omits messages. Asks before it changes anything.

    It prints what will be repeated or omitted. A running instance is fenced off, and exits with the reason. When
    restarted, the consumer continues from the new positions. Its tables stay as they are. A transaction that is open at
    a position is delivered as a whole once it is acknowledged. With --sources, a new consumer begins at the positions.
    """
    _move(name, store, parse_target(to), journal or (), sources, endpoint, sure=yes, only_forward=False)


def skip(
    name: ConsumerName,
    to: To,
    store: Store,
    journal: Journals = None,
    sources: Sources = "",
    yes: Sure = False,
    endpoint: Endpoint = None,
) -> None:
    """Move a consumer forward only, so that it omits messages. Asks before it changes anything.

    Like `reset`, but it moves no journal back, so that nothing is repeated. To omit a message, skip past the
    acknowledgement of its transaction.
    """
    _move(name, store, parse_target(to), journal or (), sources, endpoint, sure=yes, only_forward=True)


def begin_at(name: str, to: str, store: str, sources: str, endpoint: str | None) -> None:
    """Set the first positions of a new consumer in the journals of a selector. Raises as `reset`.

    `to` is as for `reset`. Does nothing if the consumer has ever raised its fence, even if it has read nothing yet:
    otherwise, a restart could omit messages.
    """
    target = parse_target(to, "--start")
    if target == EARLIEST or read_checkpoint(store, name) is not None:
        return

    async def plan(client: JournalClient) -> list[Move]:
        return await plan_moves(client, Checkpoint(), target, sources=sources)

    if moves := with_client(endpoint, plan):
        change_checkpoint(store, name, apply_moves(moves))


def parse_target(text: str, option: str = _OPTION) -> Target:
    """Parse the value of an option that sets positions. Raises InvalidInput."""
    if text in (EARLIEST, LATEST):
        return text
    path = Path(text)
    if text.startswith("{"):
        try:
            return vector_of_json(json.loads(text), option)
        except ValueError as error:
            raise InvalidInput(f"is not JSON: {error}", field=option) from None
    if "=" in text:
        pairs = [each.rpartition("=") for each in text.split(",")]
        if any(not journal or not offset.isdecimal() for journal, _, offset in pairs):
            raise InvalidInput(f"{text!r} is not JOURNAL=OFFSET, such as shop/orders=1024", field=option)
        return {journal: int(offset) for journal, _, offset in pairs}
    if path.is_file() or path.suffix == ".json":
        return load_offsets(path, option)
    if not text or (text.isdecimal() and len(text) < _SHORTEST_TIME):
        raise InvalidInput(
            f"{text!r} names no journal: give {EARLIEST}, {LATEST}, a time, a file of offsets, or JOURNAL=OFFSET",
            field=option,
        )
    at = float(parse_time(text, time.time(), option))
    require_past(at, option)
    return at


def _move(
    name: str,
    store: str,
    target: Target,
    journals: Sequence[str],
    sources: str,
    endpoint: str | None,
    *,
    sure: bool,
    only_forward: bool,
) -> None:
    checkpoint = _checkpoint(store, name, is_new=bool(sources))

    async def plan(client: JournalClient) -> list[Move]:
        return await plan_moves(client, checkpoint, target, journals, sources=sources, only_forward=only_forward)

    moves = with_client(endpoint, plan)
    if not moves:
        typer.echo(f"{name}: there is nothing to move")
        return
    print_table(["JOURNAL", "FROM", "TO", "EFFECT", "MESSAGES", "BYTES", "OPEN"], [_row(each) for each in moves])
    typer.echo("")
    if not sure:
        if not sys.stdin.isatty():
            raise InvalidInput("nothing has changed; if this is meant, confirm it with --yes", field="--yes")
        typer.confirm(f"Move {name}, and fence off its running instance?", abort=True)
    done = change_checkpoint(store, name, apply_moves(moves))
    typer.echo(f"{name}: moved in {len(moves)} journals, under fence {done.fence}; it continues there when it starts")


def _checkpoint(store: str, name: str, *, is_new: bool) -> Checkpoint:
    """Return the checkpoint of a consumer; with `is_new`, it may have none yet. Raises InvalidInput."""
    found = read_checkpoint(store, name)
    if found is None or not found.checkpoint.sources:
        if read_checkpoint(store, f"{name}@"):
            raise InvalidInput(f"{name!r} is a consumer by windows: materialize its windows again", field="NAME")
        if not is_new:
            raise InvalidInput(
                f"consumer {name!r} has no checkpoint in the store; if it is new, name its journals with --sources",
                field="NAME",
            )
    if found is None:
        return Checkpoint()
    if found.checkpoint.batch:
        raise InvalidInput(
            f"{name!r} is a streaming query, whose position is in Spark's checkpoint: start a query of another name, "
            "with another checkpoint and startingOffsets",
            field="NAME",
        )
    return found.checkpoint


def _row(move: Move) -> Sequence[str]:
    begin, end = move.span
    effect = "repeated" if move.repeats else "omitted" if move.omits else "from an earlier journal"
    is_known = not move.is_other_journal
    return [
        move.journal,
        str(move.known.read_through),
        str(move.source.read_through),
        effect,
        str(move.messages) if is_known and move.messages is not None else "-",
        str(end - begin) if is_known else "-",
        str(sum(state.is_pending for state in move.source.producers.values())),
    ]
