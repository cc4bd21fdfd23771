"""One append of small content over the stream to a broker."""

from __future__ import annotations

import asyncio
import hashlib

import grpc.aio

from coranto.client.append_outcome import checked, failed_commit, outcome_unknown, subject_of
from coranto.client.append_stream import NotSent
from coranto.client.call_ends import cancelled_from_outside
from coranto.client.dispatch import Dispatcher
from coranto.client.values import AppendResult
from coranto.errors import Unavailable
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb


async def append_small(
    dispatcher: Dispatcher, parameters: pb.AppendRequest, content: bytes, *, registers: bool
) -> AppendResult | None:
    """Append content, wholly or not at all. Returns None if the broker serves no streams: then nothing was applied.

    A broker that was wrongly taken for the primary refuses the append. `registers` and errors are those of an
    `Appender` that commits.
    """
    journal, subject, length = parameters.journal, subject_of(parameters), len(content)
    way = await dispatcher.connected_to_primary(subject, journal)
    parameters.do_not_proxy = way.routed
    metadata = way.tokens.about(Capability.APPEND, journal)
    closed = Unavailable(f"{subject}: the connection to {way.endpoint} was closed")
    sending = False
    try:
        stream = await way.connection.append_streams.get(metadata)
        if stream is None:
            return None
        sending = True
        encoded = await stream.append(parameters, content, metadata)
    except NotSent as error:
        raise Unavailable(f"{subject}: {way.endpoint} could not serve it ({error})") from None
    except grpc.aio.AioRpcError as error:
        raise (failed_commit(way, subject, length, error) if sending else way.failure(subject, error)) from error
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise (outcome_unknown(subject, length, closed) if sending else closed) from None
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    response = pb.AppendResponse.FromString(encoded)
    return checked(way, response, subject, journal, length, digest, registers=registers)
