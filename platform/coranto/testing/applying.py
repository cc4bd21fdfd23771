"""Journals that tests need, whatever becomes of the answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coranto.client import JournalClient
from coranto.errors import ApplyOutcomeUnknown
from coranto.specs.validation import ANY_REVISION
from coranto.wire import protocol_pb2 as pb

_TRIES: Final = 10


async def apply_specs(client: JournalClient, specs: Iterable[pb.JournalSpec]) -> pb.Header:
    """Have journals be as these say, whatever they were before.

    As it says the same whatever was applied, it is said again where an answer was lost, as it is when a broker ends
    on a machine that stood still. Raises what `JournalClient.apply` does, ApplyOutcomeUnknown only after several tries.
    """
    changes = [pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=ANY_REVISION) for spec in specs]
    for _ in range(_TRIES - 1):
        try:
            return await client.apply(changes)
        except ApplyOutcomeUnknown:
            continue  # The next one waits for a connection.
    return await client.apply(changes)
