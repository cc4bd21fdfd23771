"""Tokens for calls: reused for half of their lifetime, and limited to the rights that a call needs."""

from __future__ import annotations

import base64

from coranto.labels import parse_selector
from coranto.security.call_tokens import CallTokens, Metadata
from coranto.security.tokens import TOKEN_SECONDS, BearerToken, Capability, Claims, Keys, bearer_of, sign, verify


class SetClock:
    """A clock with a time that tests set."""

    time = 1_700_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


KEYS = Keys.parse(base64.b64encode(b"k" * 32).decode())


def claims_of(metadata: Metadata | None, now: float) -> Claims:
    assert metadata is not None
    token = bearer_of([metadata[0][1]])
    assert token is not None
    return verify(token, KEYS, now)


def test_a_token_is_for_one_journal_and_reused_for_half_of_its_lifetime() -> None:
    clock = SetClock()
    tokens = CallTokens(KEYS, clock)
    first = tokens.for_journal(Capability.READ, "a/one")
    claims = claims_of(first, clock.now())
    assert claims.capability == Capability.READ
    assert claims.selector == parse_selector("name=a/one")
    assert tokens.for_journal(Capability.READ, "a/one") is first
    assert tokens.for_journal(Capability.APPEND, "a/one") != first
    assert tokens.for_journal(Capability.READ, "a/two") != first
    clock.time += TOKEN_SECONDS / 2 - 1
    assert tokens.for_journal(Capability.READ, "a/one") is first
    clock.time += 2
    later = tokens.for_journal(Capability.READ, "a/one")
    assert claims_of(later, clock.now()).exp > claims.exp


def test_setting_the_clock_back_makes_a_new_token() -> None:
    clock = SetClock()
    clock.time += 10_000
    tokens = CallTokens(KEYS, clock)
    first = tokens.for_journal(Capability.READ, "a/one")
    clock.time -= 5_000
    assert tokens.for_journal(Capability.READ, "a/one") is not first


def test_a_given_token_is_sent_unchanged_and_without_one_none_is_sent() -> None:
    clock = SetClock()
    own = sign(Claims(Capability.ALL, parse_selector(""), clock.now(), clock.now() + 60), KEYS)
    found = CallTokens(BearerToken.parse(own), clock).for_journal(Capability.READ, "a/one")
    assert found is not None
    assert bearer_of([found[0][1]]) == own
    assert CallTokens(None, clock).for_journal(Capability.READ, "a/one") is None
    assert CallTokens(None, clock).for_selector(Capability.READ, parse_selector("")) is None
