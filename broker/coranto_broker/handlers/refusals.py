"""The refusal of requests about journals that the caller's claims do not cover.

Such a journal appears to be missing, even if the request is malformed. Only callers with access to the journal get the
details of a malformed request.
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
    """Return True if the claims are limited, and the journal is missing or not covered by them."""
    if claims.covers_all:
        return False
    item = broker.keyspace.state.item(strip_metadata(journal))
    return item is None or not claims.covers(item.id, item.spec.labels)


def is_acceptable(broker: Broker, request: Message, journal: str, claims: Claims) -> bool:
    """Return True to serve a request about a journal, or False to answer JOURNAL_NOT_FOUND.

    Raises InvalidInput for a malformed request of a caller with access to the journal.
    """
    try:
        validate(request)
    except InvalidInput:
        if journal and is_hidden(broker, journal, claims):
            return False
        raise
    return True
