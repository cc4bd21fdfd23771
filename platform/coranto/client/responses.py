"""Checks of brokers' answers, and the errors of answers that fail them."""

from __future__ import annotations

from google.protobuf.message import Message

from coranto.errors import CorruptData, InvalidInput, RegisterMismatch, StatusError, TornAppend, status_error
from coranto.specs.validation import validate, validate_append_response
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import HeadsResponse, NoteResponse

Headed = pb.ListResponse | pb.ApplyResponse | pb.FragmentsResponse | HeadsResponse | NoteResponse


def check_well_formed(message: Message, subject: str) -> None:
    """Raise CorruptData for an answer that violates the protocol."""
    try:
        validate(message)
    except InvalidInput as error:
        raise CorruptData(f"{subject}: the broker violated the protocol: {error}") from error


def check_appended(response: pb.AppendResponse, subject: str, *, registers: bool) -> None:
    """Check the answer to an append, like `check_well_formed`. Without `registers` its registers are not validated."""
    try:
        validate_append_response(response, registers=registers)
    except InvalidInput as error:
        raise CorruptData(f"{subject}: the broker violated the protocol: {error}") from error


def check_answer(response: Headed, subject: str) -> pb.Header:
    """Return the header of an answer with the status OK. Raises StatusError for any other status."""
    if response.status != pb.OK:
        raise status_error(response.status, subject, response.header)
    check_well_formed(response.header, subject)
    return response.header


def append_failure(response: pb.AppendResponse, subject: str) -> StatusError | None:
    """Return the error of a refused append, or None. A refused append was not applied."""
    if response.status == pb.OK:
        return None
    if response.status == pb.REGISTER_MISMATCH:
        return RegisterMismatch(subject, response.header, response.store_health_error, response.registers)
    if response.status == pb.NOT_ALLOWED and response.store_health_error:
        return TornAppend(subject, response.header, response.store_health_error)
    return status_error(response.status, subject, response.header, response.store_health_error)
