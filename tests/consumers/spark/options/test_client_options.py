"""Options for connections to brokers."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from coranto.client import ClientConfig
from coranto.security.oidc.client import OidcClient
from coranto.security.tls import ClientTls
from coranto.security.tokens import BearerToken, Keys, Secret
from coranto_consumers.spark.options.client_options import client_of, client_options

ENDPOINT = {"endpoint": "127.0.0.1:1"}


def given(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


KEYS = ",".join(["QUFB" * 11, "QkJC" * 11])


@pytest.mark.parametrize(
    "config",
    [
        ClientConfig("127.0.0.1:1"),
        ClientConfig("127.0.0.1:1", Path("/srv/root"), 3.5, Keys.parse(KEYS)),
        ClientConfig("127.0.0.1:1", auth=OidcClient("https://login.example", "etl", Secret("s"), "read", "coranto")),
        ClientConfig("127.0.0.1:1", auth=OidcClient("https://login.example", "person")),
        ClientConfig("broker-0:1,broker-1:1", zone="eu-1", name="nightly/orders"),
        ClientConfig(
            "https://b:1", auth=BearerToken.parse("a.b.c"), tls=ClientTls(Path("/ca"), Path("/c"), Path("/k"))
        ),
    ],
)
def test_a_client_is_configured_alike_on_both_sides(config, monkeypatch):
    for name in ("AUTH_KEYS", "AUTH_TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY", "ZONE", "CLIENT_NAME"):
        monkeypatch.delenv(f"CORANTO_{name}", raising=False)

    assert client_of(given(client_options(config))) == config


def test_the_environment_configures_a_client_where_options_are_absent(monkeypatch):
    monkeypatch.setenv("CORANTO_AUTH_KEYS", KEYS)

    assert client_of(ENDPOINT).auth == Keys.parse(KEYS)
    assert client_of({**ENDPOINT, "authtoken": "a.b.c"}).auth == BearerToken.parse("a.b.c")
    provider = {"oidcissuer": "https://login.example", "oidcclientid": "etl"}
    assert client_of({**ENDPOINT, **provider}).auth == OidcClient("https://login.example", "etl")
