"""The resource finds a cluster by its fields, or by the environment for empty fields."""

from __future__ import annotations

import base64
from pathlib import Path

import dagster as dg
import pytest
from pydantic import SecretStr

from coranto.client import ClientConfig, ClientTls
from coranto.client.loop import run_blocking
from coranto.cluster import EtcdServer
from coranto.errors import InvalidInput
from coranto.security.tokens import BearerToken, Keys
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from dagster_coranto import JournalResource
from tests.servers.oidc import CLIENT, SECRET, oidc_server

KEYS = base64.b64encode(b"k" * 32).decode()
OIDC = tuple(f"OIDC_{name}" for name in ("ISSUER", "CLIENT_ID", "CLIENT_SECRET", "SCOPE", "AUDIENCE"))
VARIABLES = (*OIDC, "ENDPOINT", "AUTH_KEYS", "AUTH_TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY", "ZONE", "DATA", "FILE_ROOT")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"CORANTO_{name}", raising=False)


def test_fields_configure_the_client() -> None:
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


def test_the_environment_configures_empty_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"ENDPOINT": "https://broker:1", "AUTH_TOKEN": "a.b.c", "TLS_CA": "/ca", "ZONE": "eu-1"}
    for name, value in given.items():
        monkeypatch.setenv(f"CORANTO_{name}", value)
    assert JournalResource().client_config() == ClientConfig(
        "https://broker:1", auth=BearerToken.parse("a.b.c"), tls=ClientTls(Path("/ca")), zone="eu-1"
    )
    # Fields override the environment, and keys replace a token.
    other = JournalResource(auth_keys=KEYS, zone="eu-2").client_config()
    assert (other.auth, other.zone, other.tls) == (Keys.parse(KEYS), "eu-2", ClientTls(Path("/ca")))


def test_secrets_are_read_from_named_variables(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_client_of_an_oidc_provider_lists_journals_in_an_asset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker in this process and a real provider. Dagster shows the secret nowhere."""
    with oidc_server() as oidc, EtcdServer(tmp_path / "etcd", fsync=False) as etcd:
        oidc.token_claims = {"groups": ["operators"]}
        file = tmp_path / "provider.toml"
        grant = 'when = { groups = "operators" }\ncapabilities = ["LIST"]\nselector = ""'
        file.write_text(f'issuer = "{oidc.issuer}"\naudience = "coranto"\n[[grants]]\n{grant}\n')
        settings = BrokerSettings(
            etcd=etcd.endpoint, data_dir=tmp_path / "data", auth_keys=SecretStr(KEYS), oidc=file, retention=False
        )
        process = run_blocking(started(settings))
        try:
            monkeypatch.setenv("TEAM_SECRET", SECRET)
            seen: list[int] = []

            @dg.asset
            def look(journals: JournalResource) -> None:
                with journals.client() as client:
                    seen.append(len(client.list().journals))

            fields = {"endpoint": process.endpoint, "oidc_issuer": oidc.issuer, "oidc_client_id": CLIENT}
            for secret in (dg.EnvVar("TEAM_SECRET"), SECRET):
                resource = JournalResource(**fields, oidc_client_secret=secret)
                assert dg.materialize([look], resources={"journals": resource}).success
                assert SECRET not in repr(resource)
            assert seen == [0, 0]
            assert [form["grant_type"] for form in oidc.forms] == ["client_credentials"]
        finally:
            run_blocking(process.__aexit__(None, None, None))


async def started(settings: BrokerSettings) -> BrokerProcess:
    return await BrokerProcess(settings).__aenter__()


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
def test_invalid_fields_are_refused(fields: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        JournalResource(**fields).client_config()
