"""Notes: short texts that brokers keep in etcd about files of a fragment store (the RPC `Note`).

Audits use notes to detect changed files, because write access to the store gives no write access to its notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from coranto.client.responses import check_answer
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import NoteRequest

if TYPE_CHECKING:
    from coranto.client.dispatch import ChosenConnection


@dataclass(frozen=True, slots=True)
class Note:
    """A note, and the number of its writes: 0 if the note does not exist."""

    content: bytes = b""
    version: int = 0


async def ask(chosen: ChosenConnection, request: NoteRequest) -> Note | None:
    """Read or write a note, and return it; None if the broker does not support notes.

    Raises the client's errors, and EtcdTransactionFailed if the note was not written because it has another version.
    """
    subject = f"note about {request.fragment_store}"
    # Older brokers check READ.
    metadata = await chosen.for_selector(Capability.NOTE | Capability.READ, pb.LabelSelector())
    call = chosen.connection.heads_stub.Note(request, metadata=metadata)
    with chosen.calling(subject, call):
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise
    # The retry of a write whose first answer was lost finds its own content.
    again = (request.content, request.expect_version + 1) == (response.content, response.version)
    if request.write and again and response.status == pb.ETCD_TRANSACTION_FAILED:
        response.status = pb.OK
    check_answer(response, subject)
    return Note(response.content, response.version)
