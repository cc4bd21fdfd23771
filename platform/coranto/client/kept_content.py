"""Reads of content by journal, offsets and SHA-1.

Brokers search their caches, their files of current and earlier journals of the name, and files that were set aside.
Gazette's brokers, and early versions of Coranto's, return the current content at the offsets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coranto.client.responses import check_well_formed
from coranto.fragments.fragment import Fragment
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client.dispatch import ChosenConnection


@dataclass(frozen=True, slots=True)
class KeptContent:
    """The content of a fragment, and the broker that has it, as `zone/id`."""

    content: bytes
    broker: str


async def ask(chosen: ChosenConnection, fragment: Fragment) -> KeptContent | None:
    """Return the content of a fragment if a broker has it with the right SHA-1. Raises the client's errors."""
    request = pb.ReadRequest(journal=fragment.journal, offset=fragment.begin, end_offset=fragment.end)
    request.content_sum.CopyFrom(fragment.to_wire().sum)
    subject = f"read of {fragment.content_path}"
    pieces: list[bytes] = []
    broker, offset = "", fragment.begin
    call = chosen.stub.Read(request, metadata=await chosen.for_journal(Capability.READ, fragment.journal))
    with chosen.calling(subject, call):
        async for response in call:
            check_well_formed(response, subject)
            if response.HasField("header"):
                broker = f"{response.header.process_id.zone}/{response.header.process_id.suffix}"
            if response.status != pb.OK or (response.content and response.offset != offset):
                return None
            pieces.append(response.content)
            offset += len(response.content)
    content = b"".join(pieces)
    right = hashlib.sha1(content, usedforsecurity=False).digest() == fragment.sum
    return KeptContent(content, broker) if right else None
