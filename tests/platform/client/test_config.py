"""Endpoints and settings of clients."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.config import OIDC_VARIABLES, ChannelTarget, ClientConfig, parse_endpoint
from coranto.errors import InvalidInput
from coranto.security.oidc.client import OidcClient
from coranto.security.tls import ClientTls
from coranto.security.tokens import Secret


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("127.0.0.1:8080", ChannelTarget("127.0.0.1:8080", False)),
        ("http://broker-0.example:8080", ChannelTarget("broker-0.example:8080", False)),
        ("http://broker/", ChannelTarget("broker:80", False)),
        ("https://broker", ChannelTarget("broker:443", True)),
        ("[::1]:8080", ChannelTarget("[::1]:8080", False)),
        ("unix:///run/coranto.sock", ChannelTarget("unix:/run/coranto.sock", False)),
    ],
)
def test_endpoints(endpoint: str, target: ChannelTarget) -> None:
    assert parse_endpoint(endpoint) == target


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        ":8080",
        "ftp://broker:1",
        "broker:port",
        "http://broker:1/path",
        "http://broker:1?query=1",
        "unix://",
        "127.0.0.1:1,",
        "127.0.0.1:1,https://127.0.0.1:2",
    ],
)
def test_invalid_endpoints(endpoint: str) -> None:
    with pytest.raises(InvalidInput, match="endpoint"):
        ClientConfig(endpoint)


def test_several_endpoints() -> None:
    config = ClientConfig("broker-0:1, http://[::1]:2,unix:///run/coranto.sock")
    assert config.seeds == ("broker-0:1", "http://[::1]:2", "unix:///run/coranto.sock")
    assert ClientConfig("https://a,https://b", tls=ClientTls()).seeds == ("https://a", "https://b")
    with pytest.raises(InvalidInput, match="all endpoints must be https, or none"):
        ClientConfig("https://a,b:1", tls=ClientTls())


@pytest.mark.parametrize(
    ("field", "value"),
    [("zone", "a#b"), ("zone", "z" * 33), ("route_cache", -1), ("name", "a b"), ("name", "ä"), ("name", "n" * 129)],
)
def test_zone_route_cache_and_name_are_validated(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        ClientConfig("broker:1", **{field: value})


def test_the_zone_comes_from_the_environment() -> None:
    assert ClientConfig.from_environment("broker:1", environment={"CORANTO_ZONE": "eu-1"}).zone == "eu-1"


def test_a_configuration_round_trips_through_pickle() -> None:
    config = ClientConfig("127.0.0.1:1", Path("/data"), 3.0, zone="eu-1", route_cache=7)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("make", [JournalClient.of, SyncJournalClient.of])
def test_an_endpoint_is_not_a_configuration(make: Callable[[ClientConfig], object]) -> None:
    given: Any = "127.0.0.1:8080"
    with pytest.raises(InvalidInput, match=r"client: is a str, .* give ClientConfig\('127\.0\.0\.1:8080'\)"):
        make(given)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"AUTH_KEYS": "a", "AUTH_TOKEN": "b"}, "only one of CORANTO_AUTH_TOKEN and CORANTO_AUTH_KEYS"),
        ({"AUTH_TOKEN": "b", "OIDC_ISSUER": "https://a"}, "only one of CORANTO_AUTH_TOKEN and CORANTO_OIDC_ISSUER"),
        ({"OIDC_ISSUER": "https://a"}, r"\$CORANTO_OIDC_ISSUER and \$CORANTO_OIDC_CLIENT_ID must both be set"),
        ({"OIDC_ISSUER": "http://a", "OIDC_CLIENT_ID": "b"}, "not an https"),
    ],
)
def test_conflicting_variables_are_refused(variables: dict[str, str], problem: str) -> None:
    environment = {f"CORANTO_{name}": value for name, value in variables.items()}
    with pytest.raises(InvalidInput, match=problem):
        ClientConfig.from_environment("127.0.0.1:1", environment=environment)


def test_an_oidc_client_is_configured_by_the_environment() -> None:
    values = ("https://login.example", "etl", "secret", "read write", "coranto")
    environment = dict(zip(OIDC_VARIABLES, values, strict=True))
    found = ClientConfig.from_environment("127.0.0.1:1", environment=environment).auth
    assert found == OidcClient("https://login.example", "etl", Secret("secret"), "read write", "coranto")
    assert ClientConfig.from_environment("127.0.0.1:1", environment={"CORANTO_OIDC_CLIENT_ID": "etl"}).auth is None
