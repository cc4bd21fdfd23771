"""`coranto consumer accept-journals`: continue in journals that were recreated with the same content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from coranto import labels
from coranto.cli.connect import Endpoint, find_cluster
from coranto.client import JournalClient
from coranto.errors import InvalidInput, Unavailable
from coranto.messages.checkpoints import Checkpoint
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.cli.arguments import Consumer, ConsumerName, StoreOrNone
from coranto_consumers.cli.shards import with_consumer
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.stores.changing import change_checkpoint
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.reading import read_checkpoint


def accept_journals(
    name: ConsumerName,
    journals: Annotated[list[str], typer.Argument(metavar="JOURNAL...", help="The sources to accept.")],
    store: StoreOrNone = None,
    consumer: Consumer = None,
    endpoint: Endpoint = None,
) -> None:
    """Accept sources that were deleted and recreated with the same content.

    Only use it if each JOURNAL has the same content as before up to the consumer's offset: it was recreated over its
    stored fragments, or recovered. The consumer then continues at its offset.

    With --store (SQL or Iceberg), the checkpoint is changed, and a running consumer is fenced off. Without it, NAME is
    a shard of --consumer, such as a shard with a recovery log: it gets a label with the ids of the current journals,
    and is restarted if it has failed.
    """
    if store is not None and consumer is None:
        _accept_in_store(store, name, journals)
        return

    async def work(client: ShardClient) -> None:
        async with JournalClient.of(find_cluster(endpoint)) as present:
            ids = await _present_ids(present, journals)
        await _accept_in_shard(client, name, ids)

    with_consumer(consumer, work)


def _accept_in_store(store: str, name: str, journals: Sequence[str]) -> None:
    found = read_checkpoint(store, name)
    known = found.checkpoint.sources if found is not None else {}
    if missing := sorted(set(journals) - known.keys()):
        raise InvalidInput(f"{missing[0]} is not a source in the checkpoint of consumer {name!r}", field="JOURNAL")

    def accepted(restored: Restored) -> Checkpoint:
        checkpoint = restored.checkpoint
        sources = {
            journal: replace(source, journal_id="") if journal in journals else source
            for journal, source in checkpoint.sources.items()
        }
        return replace(checkpoint, sources=sources)

    change_checkpoint(store, name, accepted)
    for journal in sorted(journals):
        typer.echo(f"{journal}: consumer {name} continues at {known[journal].read_through}, whatever id it has")


async def _present_ids(client: JournalClient, journals: Sequence[str]) -> dict[str, str]:
    """Return the ids of journals.

    Raises InvalidInput if a journal does not exist or has no id, and Unavailable if no broker knows the id.
    """
    found = (await client.heads(labels.label_selector(include=[(labels.NAME, name) for name in journals]))).by_name
    for name in journals:
        if name not in found:
            raise InvalidInput(f"there is no journal {name}", field="JOURNAL")
        if not found[name].known:
            raise Unavailable(f"no broker knows the id of {name}: {found[name].problem}")
        if not found[name].journal_id:
            raise InvalidInput(f"{name} has no id, so it needs no acceptance", field="JOURNAL")
    return {name: found[name].journal_id for name in journals}


async def _accept_in_shard(client: ShardClient, name: str, ids: dict[str, str]) -> None:
    shard = next((each for each in await client.list(f"id={name}")), None)
    if shard is None:
        raise InvalidInput(f"there is no shard {name}; `coranto shards list` shows all", field="NAME")
    if missing := sorted(ids.keys() - {source.journal for source in shard.spec.sources}):
        raise InvalidInput(f"{missing[0]} is not a source of shard {name}", field="JOURNAL")
    spec = pc.ShardSpec()
    spec.CopyFrom(shard.spec)
    for journal, journal_id in ids.items():
        if (value := f"{journal_id}/{journal}") not in labels.values_of(spec.labels, labels.SAME_CONTENT):
            spec.labels.CopyFrom(labels.add_value(spec.labels, labels.SAME_CONTENT, value))
    await client.apply([pc.ApplyRequest.Change(upsert=spec, expect_mod_revision=shard.mod_revision)])
    started = await client.unassign([name], only_failed=True)
    when = "now" if started else "when it starts next"
    for journal, journal_id in sorted(ids.items()):
        typer.echo(f"{journal}: shard {name} takes id {journal_id} for the journal of its checkpoint {when}")
