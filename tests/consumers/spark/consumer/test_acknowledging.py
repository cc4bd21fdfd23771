"""Acknowledgements of a checkpoint: a journal that is not found is gone, unless the token may hide it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from coranto.client import SyncJournalClient
from coranto.errors import PermissionDenied
from coranto.security.tokens import BearerToken, Capability, Keys, Secret, claims_for, scope_of, sign
from coranto_consumers.spark.consumer.acknowledging import acknowledge

INTENTS = {"out/gone": b"ack\n", "out/here": b"ack\n"}


def test_a_journal_that_is_gone_costs_no_other_its_acknowledgement(broker):
    broker.create("out/here")
    with SyncJournalClient.of(broker.config) as client:
        assert acknowledge(client, INTENTS).journals == 1
    assert broker.content("out/here") == b"ack\n"


def test_a_journal_that_the_token_does_not_show_is_not_taken_for_gone(broker):
    broker.create("out/here")
    claims = claims_for(Capability.APPEND, scope_of(["out/here"]), time.time(), 60)
    token = BearerToken.parse(sign(claims, Keys((Secret(b"k" * 32),))))
    with SyncJournalClient.of(replace(broker.config, auth=token)) as client:
        with pytest.raises(PermissionDenied, match=r"out/gone.* the token does not cover it"):
            acknowledge(client, INTENTS)
    assert broker.content("out/here") == b"ack\n"
