"""Requests about one journal that the caller may not know of.

Such a journal looks as one that does not exist. That holds whatever else is in the request: what is malformed is told
to those who may ask about the journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import Message

from coranto.errors import InvalidInput
from coranto.names import strip_metadata
from coranto.security.tokens import Claims
from coranto.specs.validation import validate

if TYPE_CHECKING:
    from coranto_broker.broker import Broker


def is_hidden(broker: Broker, journal: str, claims: Claims) -> bool:
    """Whether the caller is told that there is no such journal."""
    if claims.covers_all:
        return False
    item = broker.keyspace.state.item(strip_metadata(journal))
    return item is None or not claims.covers(item.id, item.spec.labels)


def is_acceptable(broker: Broker, request: Message, journal: str, claims: Claims) -> bool:
    """Whether to go on with a request about a journal. If not, the answer is JOURNAL_NOT_FOUND.

    Raises InvalidInput for a malformed request of a caller who may ask about the journal.
    """
    try:
        validate(request)
    except InvalidInput:
        if journal and is_hidden(broker, journal, claims):
            return False
        raise
    return True
