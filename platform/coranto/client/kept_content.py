"""Reads of content by its identity: offsets of a journal, and the SHA-1 of what was there.

Brokers look for it in their caches, in their files of this and of former journals of the name, and in what they have
set aside. Gazette's brokers, and earlier ones of Coranto's, read the offsets as they are now.
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


async def ask(way: ChosenConnection, fragment: Fragment) -> KeptContent | None:
    """Return the content of a fragment if a broker has it, and its SHA-1 is right. Raises the client's errors."""
    request = pb.ReadRequest(journal=fragment.journal, offset=fragment.begin, end_offset=fragment.end)
    request.content_sum.CopyFrom(fragment.to_wire().sum)
    subject = f"read of {fragment.content_path}"
    pieces: list[bytes] = []
    broker, offset = "", fragment.begin
    call = way.stub.Read(request, metadata=way.tokens.about(Capability.READ, fragment.journal))
    with way.calling(subject, call):
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
