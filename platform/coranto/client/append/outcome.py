"""The outcome of an append: its result, or an error that shows whether the append may have been applied."""

from __future__ import annotations

import grpc
import grpc.aio

from coranto.client.connection import REFUSALS
from coranto.client.dispatch import ChosenConnection
from coranto.client.responses import append_failure, check_appended
from coranto.client.values import AppendResult
from coranto.errors import AppendOutcomeUnknown, CorantoError, CorruptData
from coranto.fragments.fragment import ZERO_SUM, sum_from_wire
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb


def subject_of(parameters: pb.AppendRequest) -> str:
    """Return a description of an append for error messages."""
    at = f" at offset {parameters.offset}" if parameters.offset else ""
    return f"append to {parameters.journal}{at}"


def checked(
    chosen: ChosenConnection,
    response: pb.AppendResponse,
    subject: str,
    journal: str,
    length: int,
    digest: bytes,
    *,
    registers: bool,
) -> AppendResult:
    """Return the result of an append of `length` bytes with the SHA-1 `digest`, as the broker answered it.

    Raises the broker's refusal, and CorruptData when the answer disagrees with the content.
    """
    chosen.answered(response.status, response.header)
    refusal = append_failure(response, subject)
    if refusal is not None:
        raise refusal
    check_appended(response, subject, registers=registers)
    commit = response.commit
    committed = sum_from_wire(commit.sum)
    # For empty content Gazette's brokers answer the SHA-1 of no bytes, although an empty fragment has the sum zero.
    agreed = committed == digest or (not length and committed == ZERO_SUM)
    if commit.end - commit.begin != length or not agreed:
        raise CorruptData(
            f"{subject}: {length} bytes with SHA-1 {digest.hex()} were sent, but the broker has "
            f"[{commit.begin}, {commit.end}) with SHA-1 {committed.hex()}. Treat the journal's content as suspect."
        )
    return AppendResult(
        journal=journal,
        begin=commit.begin,
        end=commit.end,
        sum=digest if length else ZERO_SUM,
        registers=response.registers,
        header=response.header,
        durability=_durability_in(response),
        stored_end=response.durability.stored_end,
        _client=chosen.durability_client,
    )


def _durability_in(response: pb.AppendResponse) -> Durability | None:
    if not response.HasField("durability"):
        return None
    found = response.durability
    return Durability(found.replicas, found.zones, found.synced_replicas, found.synced_zones)


def failed_commit(chosen: ChosenConnection, subject: str, length: int, error: grpc.aio.AioRpcError) -> CorantoError:
    """Return the error of an append that may have been sent completely."""
    failure = chosen.failure(subject, error)
    if error.code() in REFUSALS or error.code() is grpc.StatusCode.ABORTED:  # ABORTED: the broker rolled back.
        return failure
    return outcome_unknown(subject, length, failure)


def outcome_unknown(subject: str, length: int, failure: CorantoError) -> AppendOutcomeUnknown:
    """Return the error of an append of `length` bytes whose answer was lost by `failure`."""
    return AppendOutcomeUnknown(
        f"{subject}: the answer to its commit of {length} bytes was lost ({failure}). "
        "Read the journal to learn whether it was applied, or append again if readers discard duplicates."
    )
