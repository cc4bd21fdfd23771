"""A client's tokens of a provider: requested, shared, renewed in time, and kept while the provider fails."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
from typing import Any

import jwt
import pytest
import structlog.testing

from coranto.client import ClientConfig, JournalClient
from coranto.effects import SystemClock
from coranto.errors import InvalidInput, MissingExtra, Unauthenticated, Unavailable
from coranto.security.call_tokens import CallTokens
from coranto.security.oidc import client as module
from coranto.security.oidc.client import OidcClient, TokenSource, source_of
from coranto.security.tokens import Capability, Secret, shows
from tests.broker.running import eventually
from tests.servers.oidc import CLIENT, SECRET, OidcServer


def client_of(oidc: OidcServer, **fields: Any) -> OidcClient:
    return OidcClient(**{"issuer": oidc.issuer, "client_id": CLIENT, "secret": Secret(SECRET)} | fields)


def claims_of(token: str) -> dict[str, Any]:
    found: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
    return found


async def test_a_client_requests_a_token_with_its_secret_and_shares_it(oidc: OidcServer) -> None:
    client = client_of(oidc, scope="read write", audience="coranto")
    one, other = CallTokens(client, SystemClock()), CallTokens(client, SystemClock())
    assert not one.are_ready
    await asyncio.gather(*(tokens.ready() for tokens in (one, other) * 20))
    assert one.are_ready
    metadata = one.for_journal(Capability.READ, "a")
    assert metadata is not None
    assert metadata == other.for_journal(Capability.APPEND, "b")
    ((name, value),) = metadata
    assert name == "authorization"
    assert claims_of(value.removeprefix("Bearer "))["sub"] == CLIENT
    assert oidc.forms == [{"grant_type": "client_credentials", "scope": "read write", "audience": "coranto"}]


async def test_a_secret_is_sent_in_the_form_if_the_provider_requires_it(oidc: OidcServer) -> None:
    oidc.discovery = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    source = TokenSource(client_of(oidc))
    await source.ready()
    assert source.token()
    assert oidc.forms == [{"grant_type": "client_credentials", "client_id": CLIENT, "client_secret": SECRET}]


async def test_a_missing_token_is_a_retriable_error(oidc: OidcServer) -> None:
    with pytest.raises(Unavailable, match="has not received a token from"):
        TokenSource(client_of(oidc)).token()


async def test_a_token_is_renewed_in_the_background_before_it_expires(oidc: OidcServer) -> None:
    oidc.token_seconds = 2.0
    source = TokenSource(client_of(oidc))
    await source.ready()
    first = source._held
    assert first is not None
    assert first.renew_at == pytest.approx(first.issued + 4 / 3)
    await eventually(lambda: not source.is_fresh)
    oidc.token_seconds = 300
    await source.ready()  # The old one stays valid, unless the machine was suspended until it expired.
    await eventually(lambda: source.is_fresh)
    assert source._held is not first
    assert len(oidc.forms) == 2


async def test_a_failed_renewal_is_retried_while_the_old_token_is_valid(
    oidc: OidcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRESH_PART", 0.0)
    source = TokenSource(client_of(oidc))
    await source.ready()
    token = source.token()
    oidc.status = 503
    with structlog.testing.capture_logs() as logs:
        for _ in range(50):
            await source.ready()
            assert source.token() == token
            await asyncio.sleep(0.001)
        await eventually(lambda: logs)
        for _ in range(50):
            await source.ready()
    assert [entry["event"] for entry in logs] == ["oidc.token_not_renewed"], "the next attempt waits"
    assert SECRET not in str(logs)
    oidc.status = 200

    async def renewed() -> bool:
        await source.ready()
        return source.token() != token

    await eventually(renewed)


async def test_without_a_valid_token_errors_are_raised_and_requests_are_limited(oidc: OidcServer) -> None:
    source = TokenSource(client_of(oidc))
    oidc.status = 503
    for _ in range(100):
        with pytest.raises(Unavailable, match="status 503"):
            await source.ready()
    assert oidc.requests["openid-configuration"] == 1
    oidc.status = 200

    async def there() -> bool:
        try:
            await source.ready()
        except Unavailable:
            return False
        return True

    await eventually(there)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("invalid_client", Unauthenticated),
        ("invalid_scope", Unauthenticated),
        ("unauthorized_client", Unauthenticated),
        ("temporarily_unavailable", Unavailable),
        ("server_error", Unavailable),
        ("of its own", Unauthenticated),
    ],
)
async def test_refusals_raise_errors_of_their_kind(oidc: OidcServer, error: str, kind: type[Exception]) -> None:
    oidc.refusal = error
    with pytest.raises(kind, match=f"gave no token .{error}: no .+way") as refused:
        await TokenSource(client_of(oidc)).ready()
    assert "\x1b" not in str(refused.value)
    assert SECRET not in str(refused.value)


async def test_a_wrong_secret_is_refused_and_not_logged(oidc: OidcServer) -> None:
    with pytest.raises(Unauthenticated, match="invalid_client") as refused:
        await TokenSource(client_of(oidc, secret=Secret("not-the-secret"))).ready()
    assert "not-the-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'"x"',
        b"<html>",
        b"{}",
        b'{"access_token": ""}',
        b'{"access_token": 1, "token_type": "Bearer"}',
        b'{"access_token": "a b", "token_type": "Bearer"}',
        b'{"access_token": "a\\r\\nx: y", "token_type": "Bearer"}',
        b'{"access_token": "a", "token_type": "mac"}',
        b'{"access_token": "a", "token_type": "Bearer", "expires_in": "soon"}',
        b'{"access_token": "a", "token_type": "Bearer", "expires_in": -1}',
        b'{"access_token": "a", "token_type": "Bearer", "expires_in": NaN}',
        b'{"access_token": "a", "token_type": "Bearer", "expires_in": [1]}',
        b"[" * 100_000,
    ],
)
async def test_answers_without_a_token_fail(oidc: OidcServer, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "_token", lambda *_: (200, answer))
    source = TokenSource(client_of(oidc))
    with pytest.raises((Unavailable, Unauthenticated)):
        await source.ready()
    with pytest.raises(Unavailable):
        source.token()


async def test_a_refused_token_is_renewed_unless_it_is_new(oidc: OidcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(oidc)
    tokens = CallTokens(client, SystemClock())
    await tokens.ready()
    tokens.drop_rejected()
    assert tokens.are_ready
    monkeypatch.setattr(module, "_DROP_SECONDS", -1.0)
    tokens.drop_rejected()
    assert not tokens.are_ready
    await tokens.ready()
    assert len(oidc.forms) == 2


async def test_a_cancelled_call_does_not_cancel_the_renewal_of_others(oidc: OidcServer) -> None:
    source = TokenSource(client_of(oidc))
    one, other = asyncio.create_task(source.ready()), asyncio.create_task(source.ready())
    await asyncio.sleep(0)
    one.cancel()
    await other
    assert source.token()
    assert len(oidc.forms) == 1


def test_a_token_source_works_on_several_event_loops(oidc: OidcServer) -> None:
    source = source_of(client_of(oidc))
    asyncio.run(source.ready())
    asyncio.run(source.ready())
    source._held = None
    asyncio.run(source.ready())
    assert len(oidc.forms) == 2
    assert not source._renewals


def test_without_the_extra_a_client_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "oauthlib" else find(name))
    auth = OidcClient("https://login.example", "without-extra")
    with pytest.raises(MissingExtra, match=r"pip install 'coranto\[oidc\]'"):
        JournalClient("127.0.0.1:1", auth=auth)


def test_a_client_is_a_value_that_hides_its_secret(oidc: OidcServer) -> None:
    client = client_of(oidc)
    config = ClientConfig("127.0.0.1:1", auth=client)
    assert pickle.loads(pickle.dumps(config)) == config
    assert SECRET not in repr(config)
    assert not shows(client, "a/journal"), "its scope is unknown"
    for fields, problem in (({"client_id": ""}, "is empty"), ({"issuer": "http://login.example"}, "not an https")):
        with pytest.raises(InvalidInput, match=problem):
            client_of(oidc, **fields)
    with pytest.raises(InvalidInput, match="in the clear"):
        ClientConfig("broker:1", auth=client)
