"""`coranto consumer fork`, `fork-status`, `promote` and `drop-fork`: run a changed application next to the old one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import print_table
from coranto.errors import InvalidInput
from coranto_consumers.cli.arguments import Store
from coranto_consumers.forks import (
    ForkedConsumer,
    ForkStatus,
    drop_consumer,
    fork_consumer,
    promote_consumer,
)
from coranto_consumers.forks import (
    fork_status as status_of,
)
from coranto_consumers.stores.sql import SqlStore

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A Spark consumer's name, or a shard's full name in the store.", show_default=False
    ),
]
Forked = Annotated[str, typer.Argument(metavar="NEW", help="The name of the forked consumer.", show_default=False)]


def fork(
    name: Name,
    store: Store,
    new: Annotated[str, typer.Option("--as", help="The name of the forked consumer.", show_default=False)],
    journal: Annotated[
        list[str] | None,
        typer.Option(
            "--journal", help="Journal to fork that NAME has not read yet. May be repeated.", show_default=False
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option("--prefix", help="Prefix of the names of forks, before the journal's name. Default: NEW."),
    ] = "",
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="TABLE=COPY", help="Table to copy with the checkpoint. May be repeated."),
    ] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Read the forks from their beginnings, without a checkpoint.")
    ] = False,
    at_checkpoint: Annotated[
        bool, typer.Option("--at-checkpoint", help="Fork journals at the checkpoint's offsets, not at their heads.")
    ] = False,
    same_labels: Annotated[
        bool,
        typer.Option("--same-labels", help="Copy all labels of the journals. Only if no consumer selects by them."),
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Fork the journals that a consumer has read, and its checkpoint with them, under a new name.

    A changed application can then process the same input as the old one, into its own tables. If the command is
    interrupted, run it again: it continues. It prints the next steps.
    """
    opened = SqlStore(store)
    tables = dict(_pair(text) for text in table or ())

    made = with_client(
        endpoint,
        lambda client: fork_consumer(
            client,
            opened,
            name,
            new,
            journals=journal or (),
            prefix=prefix,
            tables=tables,
            from_beginning=from_beginning,
            at_checkpoint=at_checkpoint,
            same_labels=same_labels,
        ),
    )
    _print_forks(made, tables)


def _print_forks(made: ForkedConsumer, tables: Mapping[str, str]) -> None:
    read = made.checkpoint.offsets
    print_table(
        ["JOURNAL", "FORK", "READ FROM", "DIVERGES AT"],
        [
            [source, each.name, str(read.get(each.name, each.begin)), str(each.offset)]
            for source, each in sorted(made.forks.items())
        ],
    )
    for source, copy in tables.items():
        typer.echo(f"table {source} is copied to {copy}")
    below = next(iter(sorted(made.forks.values(), key=lambda each: each.name))).name
    typer.echo(
        f"\nNext, run the changed application as {made.name}, with these forks as its sources (such as {below}), and "
        "with tables of its own. Then:\n"
        f"  coranto consumer fork-status {made.name}           has it read all?\n"
        "  coranto consumer compare OLD NEW --key COLUMN   are its tables right?\n"
        f"  coranto consumer promote {made.name} --as LIVE     it continues with the live journals as LIVE, or\n"
        f"  coranto consumer drop-fork {made.name}             it is deleted"
    )


def fork_status(name: Forked, store: Store, endpoint: Endpoint = None) -> None:
    """Show how far a forked consumer has read its forks, and if it can be promoted."""
    opened = SqlStore(store)
    found: ForkStatus = with_client(endpoint, lambda client: status_of(client, opened, name))
    rows = []
    for fork in found.forks:
        read = found.read_through.get(fork.name, fork.begin)
        rows.append([fork.name, str(read), str(fork.offset), str(found.behind.get(fork.name, 0))])
    print_table(["FORK", "READ THROUGH", "DIVERGES AT", "UNREAD BYTES"], rows)
    typer.echo(f"cannot be promoted: {found.problem}" if found.problem else "can be promoted")


def promote(
    name: Forked,
    store: Store,
    new: Annotated[str, typer.Option("--as", help="The new name of the consumer.", show_default=False)],
    endpoint: Endpoint = None,
) -> None:
    """Let a forked consumer continue with the live journals, at its position, with its own tables, under a new name.

    It fails if the consumer has read content that only its forks have. The forked consumer's name is retired: no
    process can commit or start under it. The original consumer, the forks and all tables stay as they are.
    """
    opened = SqlStore(store)
    offsets = with_client(endpoint, lambda client: promote_consumer(client, opened, name, new))
    print_table(["JOURNAL", "CONTINUES AT"], [[journal, str(at)] for journal, at in sorted(offsets.items())])
    typer.echo(
        f"\nNext, stop the old application, and run the changed one as {new} with these journals as its sources. "
        f"Then `coranto consumer drop-fork {name}` deletes the forks."
    )


def drop_fork(
    name: Forked,
    store: Store,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Table to drop with it. May be repeated.", show_default=False)
    ] = None,
    endpoint: Endpoint = None,
) -> None:
    """Delete a forked consumer's forks, and retire the consumer. Only tables named with --table are dropped."""
    opened = SqlStore(store)
    gone: Mapping[str, Sequence[str]] = with_client(
        endpoint, lambda client: drop_consumer(client, opened, name, tables=table or ())
    )
    for journal in gone["journals"]:
        typer.echo(f"deleted {journal}")
    for dropped in gone["tables"]:
        typer.echo(f"dropped table {dropped}")


def _pair(text: str) -> tuple[str, str]:
    source, _, copy = text.partition("=")
    if not source or not copy:
        raise InvalidInput(f"{text!r} is not TABLE=COPY, such as totals=totals_2", field="--table")
    return source, copy
