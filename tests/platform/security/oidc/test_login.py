"""The login of a person: the device flow, and the file of its tokens."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from pathlib import Path

import pytest

from coranto.errors import InvalidInput, Unauthenticated, Unavailable
from coranto.security.oidc import login as module
from coranto.security.oidc.client import OidcClient, TokenSource
from coranto.security.oidc.login import log_in, login_file, tokens_of_login
from tests.servers.oidc import DEVICE_GRANT, PERSON, OidcServer


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def client(oidc: OidcServer) -> OidcClient:
    return OidcClient(oidc.issuer, PERSON, scope="openid offline_access")


async def logged_in(oidc: OidcServer, client: OidcClient) -> Path:
    oidc.approved = True
    return await log_in(client, lambda url, code: None)


async def test_a_person_logs_in_with_another_device(oidc: OidcServer, client: OidcClient) -> None:
    shown: list[tuple[str, str]] = []
    oidc.polls = ["authorization_pending", "authorization_pending"]
    oidc.approved = True
    path = await log_in(client, lambda *each: shown.append(each))
    assert shown == [(f"{oidc.issuer}/enter", "WDJB-MJHT")]
    assert oidc.forms == 3 * [
        {"grant_type": DEVICE_GRANT, "device_code": "dev-1", "client_id": PERSON, "scope": "openid offline_access"}
    ]
    assert path == login_file(client)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    source = TokenSource(client)
    await source.ready()
    assert source.token() == json.loads(path.read_text())["access_token"]
    assert len(oidc.forms) == 3, "the token is used as it is"


async def test_polls_slow_down_on_request(
    oidc: OidcServer, client: OidcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    oidc.polls = ["slow_down", "authorization_pending", "slow_down"]
    await logged_in(oidc, client)
    assert waits == pytest.approx([0.01, 5.01, 5.01, 10.01])


@pytest.mark.parametrize("error", ["access_denied", "expired_token", "invalid_client"])
async def test_a_refused_login_leaves_no_file(oidc: OidcServer, client: OidcClient, error: str) -> None:
    oidc.polls = ["authorization_pending", error]
    with pytest.raises(Unauthenticated, match=error):
        await logged_in(oidc, client)
    assert not login_file(client).exists()


async def test_a_code_that_is_not_entered_in_time_fails_the_login(
    oidc: OidcServer, client: OidcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_LOGIN_SECONDS", 0.1)
    with pytest.raises(Unauthenticated, match="not entered in time"):
        await log_in(client, lambda url, code: None)


async def test_a_provider_without_a_device_flow_is_reported(oidc: OidcServer, client: OidcClient) -> None:
    oidc.discovery = {"device_authorization_endpoint": None}
    with pytest.raises(InvalidInput, match="CORANTO_OIDC_CLIENT_SECRET"):
        await log_in(client, lambda url, code: None)


async def test_concurrent_users_renew_a_login_once(oidc: OidcServer, client: OidcClient) -> None:
    path = await logged_in(oidc, client)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"issued": time.time() - 600, "expires": time.time() - 300}))
    oidc.forms.clear()
    found = await asyncio.gather(*(tokens_of_login(client) for _ in range(8)))
    assert [form["grant_type"] for form in oidc.forms] == ["refresh_token"]
    assert {tokens.access for tokens in found} == {found[0].access}
    kept = json.loads(path.read_text())
    assert kept["refresh_token"] == oidc.refresh != content["refresh_token"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_an_ended_login_is_reported_with_the_command_to_renew_it(oidc: OidcServer, client: OidcClient) -> None:
    with pytest.raises(Unauthenticated, match="no login; run `coranto login`"):
        await tokens_of_login(client)
    path = await logged_in(oidc, client)
    content = json.loads(path.read_text())
    past = {"issued": 0, "expires": 1}
    path.write_text(json.dumps(content | past | {"refresh_token": "revoked"}))
    with pytest.raises(Unauthenticated, match=r"the login has ended: .*invalid_grant.*; run `coranto login`"):
        await tokens_of_login(client)
    path.write_text(json.dumps(content | past | {"refresh_token": ""}))
    with pytest.raises(Unauthenticated, match="has expired; run `coranto login`"):
        await tokens_of_login(client)
    for broken in ("", "[]", "{}", '{"access_token": "a"'):
        path.write_text(broken)
        with pytest.raises(Unauthenticated, match="cannot be read; run `coranto login`"):
            await tokens_of_login(client)


async def test_a_login_is_usable_while_the_provider_is_unavailable(oidc: OidcServer, client: OidcClient) -> None:
    path = await logged_in(oidc, client)
    content = json.loads(path.read_text())
    oidc.stop()
    path.write_text(json.dumps(content | {"issued": time.time() - 600, "expires": time.time() + 60}))
    assert (await tokens_of_login(client)).access.reveal().decode() == content["access_token"]
    path.write_text(json.dumps(content | {"issued": 0, "expires": 1}))
    with pytest.raises(Unavailable):
        await tokens_of_login(client)
    oidc.start()
    assert (await tokens_of_login(client)).access


async def test_logins_of_other_clients_are_separate(oidc: OidcServer, client: OidcClient) -> None:
    await logged_in(oidc, client)
    with pytest.raises(Unauthenticated, match="no login"):
        await tokens_of_login(OidcClient(oidc.issuer, "other"))
