"""Sources that are not the journals of a shard's checkpoint: deleted and recreated under the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coranto import labels
from coranto.client import JournalClient
from coranto.client.heads import JournalHead
from coranto.errors import InvalidInput
from coranto.messages import Source
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.journals.losses import LostContent, continue_after, log_loss, loss_by_id, loss_by_offsets


def advice(shard: str, journal: str) -> str:
    """Return the advice about a recreated source."""
    return (
        "To continue from the beginning of the present journal, or from where its head fell to, without the unread "
        f"content of the earlier one, give the shard the label {labels.DATA_LOSS}={labels.CONTINUE}, and unassign it "
        "if it has failed. A shard with another id and store begins at the journal's beginning. If the present journal "
        "has the content of the earlier one, such as "
        f"recovered content, run `coranto consumer accept-journals {shard} {journal} --consumer HOST:PORT` with the "
        "address of a process of this consumer: the shard then continues at its offset."
    )


def continues(spec: pc.ShardSpec) -> bool:
    """Return True if the shard continues after lost content. Raises InvalidInput for another value of its label."""
    value = labels.value_of(spec.labels, labels.DATA_LOSS)
    if value not in ("", labels.CONTINUE):
        raise InvalidInput(
            f"{value!r} is not {labels.CONTINUE!r}: give the label that value, or leave it out to stop at lost content",
            field=f"label {labels.DATA_LOSS}",
        )
    return value == labels.CONTINUE


async def present_sources(
    client: JournalClient, spec: pc.ShardSpec, sources: Mapping[str, Source]
) -> dict[str, Source]:
    """Return the readable sources of a checkpoint, with the ids of their journals.

    Raises JournalRecreated for an offset of an earlier journal, and CorruptData for an offset beyond a journal's end.
    If the shard may continue without lost content, such a source continues at the end of the content that both journals
    share, or at the journal's beginning, and the loss is logged. If a label of the shard has the id of a journal, it
    has the content of the earlier one, and its source continues at its offset.
    """
    may_continue = continues(spec)
    read = [each.journal for each in spec.sources if each.journal in sources and sources[each.journal].read_through]
    found = dict(sources)
    if not read:
        return found
    heads = await client.heads(labels.label_selector(include=[(labels.NAME, name) for name in read]))
    for head in heads:
        source = sources[head.journal]
        if f"{head.journal_id}/{head.journal}" in labels.values_of(spec.labels, labels.SAME_CONTENT):
            source = replace(source, journal_id=head.journal_id)
        while (lost := _loss(head, source)) is not None:
            error = lost.error(advice(spec.id, head.journal))
            if not may_continue or (head.journal_id and head.journal_id == source.journal_id):
                raise error  # To read the same journal from its beginning would count its messages twice.
            source, partly = continue_after(source, lost, head.begin)
            log_loss(lost, partly, shard=spec.id, error=str(error))
            source = replace(source, journal_id=head.journal_id)
        found[head.journal] = source
    return found


def _loss(head: JournalHead, source: Source) -> LostContent | None:
    """Return the loss of a source that cannot continue; None if it can, as far as known."""
    if not head.known:
        return None  # Its reads check the id once a broker serves it.
    lost = loss_by_id(source, head.journal, head.head, head.journal_id)
    if lost is None and head.is_end:
        lost = loss_by_offsets(head.journal, source.read_through, 0, head.head)
    return lost
