"""The offsets of a consumer's checkpoint: `coranto consumer offsets` prints them for `--as-of`, and `coranto consumer
accept-journals` has a consumer continue at them in journals that have the content of earlier ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from coranto.errors import InvalidInput
from coranto.offsets import vector_to_json
from coranto_consumers.cli.audit import ConsumerName, Store
from coranto_consumers.stores.reading import ICEBERG, read_checkpoint
from coranto_consumers.stores.sql import SqlStore


def offsets(name: ConsumerName, store: Store) -> None:
    """Print the offsets through which a consumer has committed, as JSON.

    `coranto journals read --as-of FILE` and `coranto journals manifest --as-of FILE` give the content of that moment.
    """
    found = read_checkpoint(store, name)
    if found is None or not found.checkpoint.sources:
        raise InvalidInput(f"consumer {name!r} has no checkpoint in the store", field="NAME")
    typer.echo(json.dumps(vector_to_json(found.checkpoint.offsets), indent=2))


def accept_journals(
    name: ConsumerName,
    store: Store,
    journals: Annotated[list[str], typer.Argument(metavar="JOURNAL...", help="The sources to accept.")],
) -> None:
    """Accept sources that were deleted and created again with the content that they had.

    Only use it if each JOURNAL has the same content as before up to the consumer's offset: it was created again over
    its stored fragments, or recovered. The consumer then continues at its offset. A running consumer is fenced off.
    """
    if store.startswith(ICEBERG):
        raise InvalidInput("is a catalog; this command changes SQL stores only", field="--store")
    database = SqlStore(store)
    found = database.read(name)
    known = found.checkpoint.sources if found is not None else {}
    if missing := sorted(set(journals) - known.keys()):
        raise InvalidInput(f"{missing[0]} is no source in the checkpoint of consumer {name!r}", field="JOURNAL")
    fence, checkpoint = database.raise_fence(name)
    sources = {
        journal: replace(source, journal_id="") if journal in journals else source
        for journal, source in checkpoint.sources.items()
    }
    with database.transaction(name, fence) as transaction:
        transaction.commit(replace(checkpoint, sources=sources))
    for journal in sorted(journals):
        typer.echo(f"{journal}: consumer {name} continues at {sources[journal].read_through}, whatever id it has")
