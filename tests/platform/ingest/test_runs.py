"""Ingest runs prepare their streams, and distinguish temporary failures from others."""

from __future__ import annotations

import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import (
    AppendOutcomeUnknown,
    CorantoError,
    InvalidInput,
    StreamChanged,
    StreamNotFound,
    TransactionTimeout,
    Unavailable,
)
from coranto.ingest.runs import is_transient, prepare
from tests.platform.ingest.lists import spec


async def test_a_created_stream_has_its_message_type(client: JournalClient) -> None:
    await prepare(client, spec(type="shop.N@3", registry="types/registry"))
    names = {labels.value_of(each.spec.labels, labels.MESSAGE_TYPE) for each in (await client.list()).journals}
    assert "shop.N" in names


async def test_a_missing_stream_without_create_is_an_error(client: JournalClient) -> None:
    with pytest.raises(StreamNotFound, match="there is no stream shop/orders: create it"):
        await prepare(client, spec(create=None))


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (Unavailable("x"), True),
        (AppendOutcomeUnknown("x"), True),
        (StreamChanged("x"), True),
        (TransactionTimeout("x"), True),
        (InvalidInput("x"), False),
        (StreamNotFound("x"), False),
    ],
    ids=repr,
)
def test_temporary_failures(error: CorantoError, passes: bool) -> None:
    assert is_transient(error) is passes
