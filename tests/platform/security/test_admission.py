"""Admission of calls by their tokens."""

from __future__ import annotations

import asyncio
import base64
import time

import pytest

from coranto.effects import SystemClock
from coranto.errors import PermissionDenied, Unauthenticated
from coranto.labels import parse_selector
from coranto.security.admission import UNRESTRICTED, Authorizer, TokenExpired
from coranto.security.tokens import HEADER, LEEWAY_SECONDS, Capability, Claims, Keys, sign

KEY = base64.b64encode(b"k" * 32).decode()
RULES = {"Read": Capability.READ, "Append": Capability.APPEND}


class StandingClock(SystemClock):
    """A clock that stands at a given time."""

    def __init__(self, time: float) -> None:
        self._time = time

    def now(self) -> float:
        return self._time


class Call:
    """A call with a token, or without one."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._token is None else ((HEADER, f"Bearer {self._token}"),)


def authorizer(keys: str | None = KEY) -> Authorizer:
    return Authorizer(None if keys is None else Keys.parse(keys), SystemClock(), RULES)


def token(capability: Capability) -> str:
    now = time.time()
    return sign(Claims(capability, parse_selector("name=a/one"), now - 10, now + 60), Keys.parse(KEY))


async def test_a_call_is_served_under_the_claims_of_its_token() -> None:
    async with authorizer().admitted("Read", Call(token(Capability.READ))) as claims:
        assert claims.capability == Capability.READ
        assert claims.selector == parse_selector("name=a/one")


async def test_calls_without_a_token_or_its_capability_are_refused() -> None:
    with pytest.raises(Unauthenticated, match="a token is needed"):
        async with authorizer().admitted("Read", Call(None)):
            raise AssertionError("it is served")
    with pytest.raises(PermissionDenied):
        async with authorizer().admitted("Append", Call(token(Capability.READ))):
            raise AssertionError("it is served")


async def test_without_required_keys_every_call_is_admitted() -> None:
    async with authorizer(None).admitted("Append", Call("nonsense")) as claims:
        assert claims is UNRESTRICTED
    assert authorizer(None).admits_all
    introduced = authorizer(f"AA==,{KEY}")
    assert not introduced.admits_all
    async with introduced.admitted("Append", Call(None)) as claims:
        assert claims is UNRESTRICTED
    with pytest.raises(Unauthenticated):
        async with introduced.admitted("Append", Call("nonsense")):
            raise AssertionError("it is served")


async def test_a_call_ends_when_its_token_expires_but_keeps_its_own_timeout_error() -> None:
    now = int(time.time())
    ending = sign(Claims(Capability.READ, parse_selector(""), now - 10, now + 60), Keys.parse(KEY))
    nearly_over = Authorizer(Keys.parse(KEY), StandingClock(now + 60 + LEEWAY_SECONDS - 0.05), RULES)
    with pytest.raises(TokenExpired):
        async with nearly_over.admitted("Read", Call(ending)):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with authorizer().admitted("Read", Call(token(Capability.READ))):
            raise TimeoutError
