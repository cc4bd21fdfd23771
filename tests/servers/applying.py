"""Creation of journals that tests need, even when answers get lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coranto.client import JournalClient
from coranto.errors import ApplyOutcomeUnknown
from coranto.specs.validation import ANY_REVISION
from coranto.wire import protocol_pb2 as pb

_TRIES: Final = 10


async def apply_specs(client: JournalClient, specs: Iterable[pb.JournalSpec]) -> pb.Header:
    """Create or overwrite journals with these specs, whatever their state before.

    The apply is idempotent, so it is repeated when an answer was lost, for example because a broker ended on a machine
    that stood still. Raises what `JournalClient.apply` does, ApplyOutcomeUnknown only after several tries.
    """
    changes = [pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=ANY_REVISION) for spec in specs]
    for _ in range(_TRIES - 1):
        try:
            return await client.apply(changes)
        except ApplyOutcomeUnknown:
            continue  # The next try waits for a connection.
    return await client.apply(changes)
