"""Tokens of a real provider at real brokers: RPCs, streams, the HTTP gateway, commands, and an unreachable provider."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from pydantic import SecretStr

from coranto.client import ClientConfig, JournalClient
from coranto.errors import InvalidInput, JournalNotFound, PermissionDenied, Unauthenticated
from coranto.security.oidc.client import OidcClient
from coranto.security.tokens import BearerToken, Secret
from coranto.wire import append_stream_pb2_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendBatch, StreamedAppend
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import eventually
from tests.servers.oidc import CLIENT, PERSON, SECRET, OidcServer, oidc_server, rsa_key

KEY = base64.b64encode(b"k" * 32).decode()
J = "shop/orders"
FILE = """
issuer = "{issuer}"
audience = "coranto"

[[grants]]
when = {{ groups = "operators" }}
capabilities = ["LIST", "APPLY", "READ", "APPEND", "NOTE"]
selector = ""

[[grants]]
when = {{ groups = "shop" }}
capabilities = ["LIST", "READ", "APPEND"]
selector = "name:prefix=shop/"
"""


@pytest.fixture
def oidc() -> Iterator[OidcServer]:
    with oidc_server() as server:
        yield server


@pytest.fixture
def settings(broker_settings: BrokerSettings, oidc: OidcServer, tmp_path: Path) -> BrokerSettings:
    file = tmp_path / "provider.toml"
    file.write_text(FILE.format(issuer=oidc.issuer))
    return broker_settings.model_copy(
        update={"auth_keys": SecretStr(KEY), "oidc": file, "http_port": 0, "metrics_port": 0}
    )


@contextlib.asynccontextmanager
async def running(settings: BrokerSettings) -> AsyncIterator[BrokerProcess]:
    """Run a broker that has fetched the keys."""
    async with BrokerProcess(settings) as process:
        provider = process.broker.provider
        assert provider is not None
        await eventually(lambda: provider.epoch)
        provider._min_refresh_seconds = 0.0  # Unit tests have the limit.
        yield process


def with_token(process: BrokerProcess, token: str, **fields: Any) -> JournalClient:
    return JournalClient(process.endpoint, auth=BearerToken(Secret(token)), **fields)


async def test_a_client_of_the_provider_makes_all_calls(settings: BrokerSettings, oidc: OidcServer, spec: Any) -> None:
    oidc.token_claims = {"groups": ["operators"]}
    config = {"auth": OidcClient(oidc.issuer, CLIENT, Secret(SECRET))}
    async with running(settings) as process, JournalClient(process.endpoint, **config) as client:  # type: ignore[arg-type]
        await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
        for content in (b"small\n", [b"two ", b"parts\n"], b"x" * (2 << 20)):
            await client.append(J, content)
        assert [each.spec.name for each in (await client.list()).journals] == [J]
        assert (await client.heads("")).journals[0].head == 16 + (2 << 20)
        async with client.appender(J) as append:
            append.begin()
            await append.write(b"streamed\n")
            await append.commit()
        assert await client.read_all(J, 0, 16) == b"small\ntwo parts\n"
        assert oidc.given == 1, "one token for all calls"
        url = f"{process.metrics_endpoint}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            found = re.search(r"^coranto_oidc_keys_age_seconds (\S+)$", await answer.text(), re.MULTILINE)
    assert found is not None
    assert 0 < float(found[1]) < 300


async def test_grants_limit_capabilities_and_journals(settings: BrokerSettings, oidc: OidcServer, spec: Any) -> None:
    async with running(settings) as process:
        operator, shop = oidc.token(groups=["operators"]), oidc.token(groups=["shop"])
        async with with_token(process, operator) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec(name)) for name in (J, "team/other")])
        async with with_token(process, shop) as client:
            await client.append(J, b"content")
            assert [each.spec.name for each in (await client.list()).journals] == [J]
            with pytest.raises(JournalNotFound):
                await client.append("team/other", b"content")
            with pytest.raises(PermissionDenied, match="lacks the capability APPLY"):
                await client.apply([pb.ApplyRequest.Change(upsert=spec("shop/new"))])
        for token, kind in (
            (oidc.token(groups=["others"]), PermissionDenied),
            (oidc.token(groups=["shop"], aud="other"), Unauthenticated),
            (oidc.token(groups=["shop"], exp=1), Unauthenticated),
        ):
            async with with_token(process, token, retry_timeout=0.0) as client:
                for work in (client.append(J, b"x"), client.list(), client.heads("")):
                    with pytest.raises(kind):
                        await work


async def test_the_gateway(settings: BrokerSettings, oidc: OidcServer, spec: Any) -> None:
    async with running(settings) as process:
        async with with_token(process, oidc.token(groups=["operators"])) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec(name)) for name in (J, "team/other")])
            await client.append(J, b"first ")
        async with aiohttp.ClientSession() as session:

            async def ask(method: str, journal: str, token: str, data: bytes | None = None) -> tuple[int, bytes]:
                headers = {"Authorization": f"Bearer {token}"}
                url = f"{process.http_endpoint}/{journal}"
                async with session.request(method, url, headers=headers, data=data) as answer:
                    return answer.status, await answer.read()

            token = oidc.token(groups=["shop"])
            assert (await ask("PUT", J, token, b"second"))[0] == 204
            assert await ask("GET", J, token) == (206, b"first second")
            assert (await ask("GET", "team/other", token))[0] == 404
            assert (await ask("GET", J, oidc.token(groups=["others"])))[0] == 403
            assert (await ask("GET", J, oidc.token(groups=["shop"], iss="https://other")))[0] == 401
            oidc.keys["rsa-2"] = rsa_key()
            new = oidc.token("rsa-2", groups=["shop"])
            assert (await ask("GET", J, new))[0] == 503, "its key is being fetched"

            async def served() -> bool:
                return (await ask("GET", J, new))[0] == 206

            await eventually(served)


async def test_brokers_forward_without_the_provider(
    settings: BrokerSettings, oidc: OidcServer, spec: Any, tmp_path: Path
) -> None:
    other = settings.model_copy(update={"id": "second", "data_dir": tmp_path / "other"})
    async with running(settings.model_copy(update={"id": "first"})) as one, running(other) as two:
        async with with_token(one, oidc.token(groups=["operators"])) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
            await client.append(J, b"")
        oidc.stop()
        before = dict(oidc.requests)
        content = b""
        for process in (one, two):
            async with with_token(process, oidc.token(groups=["shop"]), route_cache=0) as client:
                for append_streams in (True, False):
                    replaced = ClientConfig(
                        process.endpoint,
                        auth=client.config.auth,
                        route_cache=0,
                        append_streams=append_streams,
                    )
                    async with JournalClient.of(replaced) as plain:
                        await plain.append(J, b"0123456789")
                        content += b"0123456789"
                assert (await client.heads("")).journals[0].head == len(content)
        assert dict(oidc.requests) == before


async def test_a_removed_key_ends_its_tokens_on_open_streams(
    settings: BrokerSettings, oidc: OidcServer, spec: Any
) -> None:
    async with running(settings) as process:
        async with with_token(process, oidc.token(groups=["operators"])) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
            await client.append(J, b"")
        token = oidc.token(groups=["shop"])
        async with grpc.aio.insecure_channel(process.endpoint.removeprefix("http://")) as channel:
            call = append_stream_pb2_grpc.AppendsStub(channel).AppendStream(
                metadata=(("authorization", f"Bearer {token}"),)
            )
            await call.write(AppendBatch())
            await call.read()

            async def code(number: int) -> int:
                request = pb.AppendRequest(journal=J)
                await call.write(AppendBatch(appends=[StreamedAppend(id=number, request=request, content=b"x")]))
                (answer,) = (await call.read()).answers
                return int(answer.code)

            assert await code(1) == 0
            del oidc.keys["rsa-1"]
            oidc.keys["rsa-2"] = rsa_key()
            provider = process.broker.provider
            assert provider is not None
            provider._wanted.set()
            await eventually(lambda: "rsa-1" not in provider._keys)
            assert await code(2) in (grpc.StatusCode.ABORTED.value[0], grpc.StatusCode.UNAUTHENTICATED.value[0])
            call.cancel()


@pytest.mark.parametrize("append_streams", [True, False])
async def test_an_append_with_a_new_key_is_repeated_until_the_key_is_known(
    settings: BrokerSettings, oidc: OidcServer, spec: Any, append_streams: bool
) -> None:
    """It was certainly not applied, so its outcome is not unknown."""
    async with running(settings) as process:
        async with with_token(process, oidc.token(groups=["operators"])) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
            await client.append(J, b"")
        for number in range(2, 5):
            oidc.keys[f"rsa-{number}"] = rsa_key()
            token = oidc.token(f"rsa-{number}", groups=["shop"])
            async with with_token(process, token, append_streams=append_streams) as client:
                await client.append(J, b"0123456789")
                assert (await client.heads("")).journals[0].head == 10 * (number - 1)


async def test_a_client_whose_token_is_refused_gets_another_and_continues(
    settings: BrokerSettings, oidc: OidcServer, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto.security.oidc.client._DROP_SECONDS", -1.0)
    oidc.token_claims = {"groups": ["operators"]}
    auth = OidcClient(oidc.issuer, CLIENT, Secret(SECRET))
    async with running(settings) as process, JournalClient(process.endpoint, auth=auth) as client:
        await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
        await client.append(J, b"x")
        provider = process.broker.provider
        assert provider is not None
        for number in (2, 3):
            oidc.keys = {f"rsa-{number}": rsa_key()}
            provider._wanted.set()
            await eventually(lambda: list(provider._keys) == list(oidc.keys))
            await client.append(J, b"x")
            await client.list()
        assert (await client.heads("")).journals[0].head == 3
        assert oidc.given == 3


def test_without_a_provider_no_library_is_imported_for_one() -> None:
    code = (
        "import sys, coranto.cli.app, coranto.client, coranto.auth, coranto_broker.server.process\n"
        "names = ('oauthlib', 'jwt', 'cryptography', 'coranto.security.oidc.provider')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


async def test_a_client_continues_with_its_next_token(settings: BrokerSettings, oidc: OidcServer, spec: Any) -> None:
    """Its token ends during a read and on an open stream of appends."""
    oidc.token_seconds = 3
    oidc.token_claims = {"groups": ["operators"]}
    auth = OidcClient(oidc.issuer, CLIENT, Secret(SECRET))
    async with running(settings) as process, JournalClient(process.endpoint, auth=auth) as client:
        await client.apply([pb.ApplyRequest.Change(upsert=spec(J))])
        written = 0

        async def append() -> bool:
            nonlocal written
            await client.append(J, b"x")
            written += 1
            return oidc.given >= 3

        await eventually(append)
        assert (await client.heads("")).journals[0].head == written


async def test_a_broker_starts_without_its_provider(settings: BrokerSettings, oidc: OidcServer) -> None:
    oidc.stop()
    async with BrokerProcess(settings) as process:
        async with with_token(process, oidc.token(groups=["shop"])) as client:
            listing = asyncio.create_task(client.list())
            done, _ = await asyncio.wait([listing], timeout=0.2)
            assert not done, "it is tried again until the keys are known"
            oidc.start()
            await listing


async def test_an_invalid_setting_is_refused(settings: BrokerSettings, tmp_path: Path) -> None:
    for update, problem in (
        ({"auth_keys": SecretStr("")}, "set auth_keys too"),
        ({"oidc": tmp_path / "nothing.toml"}, "cannot be read"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            async with BrokerProcess(settings.model_copy(update=update)):
                pass


async def test_commands_use_a_secret_or_a_login(
    broker_settings: BrokerSettings,
    settings: BrokerSettings,
    oidc: OidcServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker and commands, each in a separate process."""
    monkeypatch.setenv("CORANTO_BROKER_AUTH_KEYS", KEY)
    given = {"oidc": settings.oidc, "id": "child"}  # Keys are not passed as an option.
    child = BrokerChild(broker_settings.model_copy(update=given), tmp_path / "broker.log")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    oidc.token_claims = {"groups": ["operators"]}

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = environment | {f"CORANTO_{name}": value for name, value in variables.items()}
        given |= {"XDG_CONFIG_HOME": str(tmp_path / "config")}
        command = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())", *words]
        return subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=120)

    child.start()
    try:
        endpoint = str((await child.ready())["endpoint"])
        await eventually(lambda: child.events("oidc.keys_changed"))
        provider = {"ENDPOINT": endpoint, "OIDC_ISSUER": oidc.issuer}
        secret = provider | {"OIDC_CLIENT_ID": CLIENT, "OIDC_CLIENT_SECRET": SECRET}
        person = provider | {"OIDC_CLIENT_ID": PERSON}
        assert run("journals", "list", ENDPOINT=endpoint).returncode == 1
        listed = run("journals", "list", **secret)
        assert listed.returncode == 0, listed.stderr
        before = run("journals", "list", **person)
        assert before.returncode == 1
        assert "there is no login; run `coranto login`" in before.stderr
        oidc.approved = True
        oidc.polls = ["authorization_pending"]
        entered = run("login", **person)
        assert entered.returncode == 0, entered.stderr
        assert f"Open {oidc.issuer}/enter in a browser, and enter the code WDJB-MJHT" in entered.stderr
        listed = run("journals", "list", **person)
        assert listed.returncode == 0, listed.stderr
        refused = run("login", **secret)
        assert refused.returncode == 1
        assert "without a login" in refused.stderr
        both = run("journals", "list", AUTH_KEYS=KEY, **secret)
        assert "only one of CORANTO_AUTH_KEYS and CORANTO_OIDC_ISSUER" in both.stderr
        wrong = run("journals", "list", **(secret | {"OIDC_CLIENT_SECRET": "not-the-secret"}))
        assert wrong.returncode == 1
        assert "invalid_client" in wrong.stderr
        shown = " ".join(each.stdout + each.stderr for each in (listed, entered, refused, both, wrong)) + child.log()
        assert SECRET not in shown
        assert "not-the-secret" not in shown
        assert "eyJ" not in shown, "no token is shown or logged"
    finally:
        child.close()
