"""The resource finds a cluster by its fields, and by the environment where they are empty."""

from __future__ import annotations

import base64
from pathlib import Path

import dagster as dg
import pytest

from coranto.client import ClientConfig, ClientTls
from coranto.errors import InvalidInput
from coranto.security.tokens import BearerToken, Keys
from dagster_coranto import JournalResource

KEYS = base64.b64encode(b"k" * 32).decode()
VARIABLES = ("ENDPOINT", "AUTH_KEYS", "AUTH_TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY", "ZONE", "DATA", "FILE_ROOT")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"CORANTO_{name}", raising=False)


def test_fields() -> None:
    resource = JournalResource(
        endpoint="https://broker-0:1,https://broker-1:1",
        file_root="/srv/root",
        zone="eu-1",
        auth_keys=KEYS,
        tls_ca="/ca",
        tls_cert="/cert",
        tls_key="/key",
    )
    assert resource.client_config() == ClientConfig(
        "https://broker-0:1,https://broker-1:1",
        Path("/srv/root"),
        auth=Keys.parse(KEYS),
        tls=ClientTls(Path("/ca"), Path("/cert"), Path("/key")),
        zone="eu-1",
    )


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ENDPOINT": "https://broker:1", "AUTH_TOKEN": "a.b.c", "TLS_CA": "/ca", "ZONE": "eu-1"}
    for name, value in given.items():
        monkeypatch.setenv(f"CORANTO_{name}", value)
    assert JournalResource().client_config() == ClientConfig(
        "https://broker:1", auth=BearerToken.parse("a.b.c"), tls=ClientTls(Path("/ca")), zone="eu-1"
    )
    # A field says otherwise; keys stand in place of a token.
    other = JournalResource(auth_keys=KEYS, zone="eu-2").client_config()
    assert (other.auth, other.zone, other.tls) == (Keys.parse(KEYS), "eu-2", ClientTls(Path("/ca")))


def test_secrets_come_by_the_name_of_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_TOKEN", "a.b.c")
    seen: list[ClientConfig] = []

    @dg.asset
    def look(journals: JournalResource) -> None:
        seen.append(journals.client_config())

    resource = JournalResource(endpoint="127.0.0.1:1", auth_token=dg.EnvVar("TEAM_TOKEN"))
    assert dg.materialize([look], resources={"journals": resource}).success
    assert seen[0].auth == BearerToken.parse("a.b.c")
    assert "a.b.c" not in repr(resource)
    assert "a.b.c" not in repr(seen[0])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"endpoint": "broker:1", "auth_keys": KEYS}, "in the clear"),
        ({"endpoint": "https://a:1,b:1"}, "all endpoints must be https, or none"),
        ({"endpoint": "127.0.0.1:1", "auth_keys": KEYS, "auth_token": "a.b.c"}, "only one of"),
        ({"endpoint": "https://broker:1", "tls_cert": "/cert"}, "together"),
        ({"endpoint": "127.0.0.1:1", "zone": "no#zone"}, "zone"),
    ],
)
def test_what_cannot_be(fields: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        JournalResource(**fields).client_config()
