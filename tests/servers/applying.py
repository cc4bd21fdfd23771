"""Creation of journals for tests, even when answers are lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coranto.client import JournalClient
from coranto.errors import ApplyOutcomeUnknown
from coranto.specs.validation import ANY_REVISION
from coranto.wire import protocol_pb2 as pb

_TRIES: Final = 10


async def apply_specs(client: JournalClient, specs: Iterable[pb.JournalSpec]) -> pb.Header:
    """Create or overwrite journals with these specs, whatever their state.

    The apply is idempotent, so it is repeated after a lost answer, for example because a broker exited on a stalled
    machine. Raises the errors of `JournalClient.apply`; ApplyOutcomeUnknown only after several tries.
    """
    changes = [pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=ANY_REVISION) for spec in specs]
    for _ in range(_TRIES - 1):
        try:
            return await client.apply(changes)
        except ApplyOutcomeUnknown:
            continue  # The next try waits for a connection.
    return await client.apply(changes)
