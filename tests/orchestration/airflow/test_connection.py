"""The meaning of a connection's fields."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

import coranto.client
from airflow_coranto.connection import ConnectionFields, with_connection_fields
from coranto.errors import ClusterError, InvalidInput
from coranto.fragments.stores import StoreRegistry
from coranto.security.oidc.client import OidcClient
from coranto.security.tokens import BearerToken, Keys, Secret

TOKEN = "header.payload.signature-that-nobody-may-see"
KEY = base64.b64encode(b"k" * 32).decode()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "DATA", "AUTH_TOKEN", "AUTH_KEYS", "TLS_CA", "TLS_CERT", "TLS_KEY", "ZONE"):
        monkeypatch.delenv(f"CORANTO_{name}", raising=False)


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        (ConnectionFields("broker", 8080), "broker:8080"),
        (ConnectionFields("broker:9090", 8080), "broker:9090"),
        (ConnectionFields("a, b:1,c", 8080, "https"), "https://a:8080,https://b:1,https://c:8080"),
        (ConnectionFields("[::1]:8080"), "[::1]:8080"),
        (ConnectionFields("::1", 8080), "::1:8080"),
        (ConnectionFields("https://a:1,https://b:2", 8080), "https://a:1,https://b:2"),
        (ConnectionFields("unix:///run/broker"), "unix:///run/broker"),
        (ConnectionFields(), ""),
    ],
)
def test_host_port_and_schema_make_endpoints(fields: ConnectionFields, endpoint: str) -> None:
    assert fields.endpoint == endpoint


def test_the_password_is_a_token_or_keys() -> None:
    assert isinstance(ConnectionFields("127.0.0.1", 1, password=TOKEN).client_config().auth, BearerToken)
    keys = ConnectionFields("127.0.0.1", 1, password=KEY, extra={"auth": "keys"})
    assert isinstance(keys.client_config().auth, Keys)


def test_the_password_is_the_client_secret_for_an_oidc_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORANTO_AUTH_TOKEN", TOKEN)
    extra = {"auth": "oidc", "oidc_issuer": "https://login.example", "oidc_client_id": "airflow", "oidc_scope": "read"}
    found = ConnectionFields("127.0.0.1", 1, password="hidden-secret", extra=extra).client_config().auth
    assert found == OidcClient("https://login.example", "airflow", Secret("hidden-secret"), "read")
    assert "hidden-secret" not in repr(found)


def test_keys_of_a_connection_replace_a_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORANTO_AUTH_TOKEN", TOKEN)
    keys = ConnectionFields("127.0.0.1", 1, password=KEY, extra={"auth": "keys"})
    assert isinstance(keys.client_config().auth, Keys)


def test_tls_and_zone_come_from_extra() -> None:
    extra = {"tls_ca": "/ca.pem", "tls_cert": "/cert.pem", "tls_key": "/key.pem", "zone": "eu", "file_root": None}
    config = ConnectionFields("broker", 8443, "https", "", TOKEN, extra).client_config()
    assert config.tls is not None
    assert (config.tls.ca, config.tls.cert, config.tls.key) == (Path("/ca.pem"), Path("/cert.pem"), Path("/key.pem"))
    assert config.zone == "eu"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (ConnectionFields("broker", schema="ftp", password=TOKEN), "http or https"),
        (ConnectionFields("broker", password=TOKEN, extra={"auth": "basic"}), "token, keys or oidc"),
        (ConnectionFields("127.0.0.1", password=TOKEN, extra={"auth": "oidc"}), "auth = oidc and oidc_issuer"),
        (
            ConnectionFields("127.0.0.1", password=TOKEN, extra={"oidc_issuer": "https://a"}),
            "auth = oidc and oidc_issuer",
        ),
        (
            ConnectionFields("127.0.0.1", password=TOKEN, extra={"auth": "oidc", "oidc_issuer": "https://a"}),
            "CORANTO_OIDC_CLIENT_ID must both be set",
        ),
        (ConnectionFields("broker", password=TOKEN, extra={"tls_cs": "/ca.pem"}), "tls_cs is unknown"),
        (ConnectionFields("broker.example", 80, password=TOKEN), "in the clear"),
        (ConnectionFields("127.0.0.1", 80, password="not a token", extra={"auth": "keys"}), "key"),
        (ConnectionFields("broker", password=TOKEN, extra={"auth": TOKEN}), "extra.auth"),
        (ConnectionFields("broker", schema="https", login=TOKEN, password=TOKEN), "no users"),
        (ConnectionFields(f"https://me:{TOKEN}@broker:1", password=TOKEN), "no users"),
        (ConnectionFields("broker", 1, "https", "", TOKEN, {"tls_key": f"-----BEGIN KEY-----\n{TOKEN}"}), "PEM text"),
    ],
)
def test_invalid_fields_are_refused_without_the_password(fields: ConnectionFields, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        fields.client_config()
    shown = f"{refused.value}{refused.value.__cause__}{fields!r}"
    assert fields.password not in shown
    assert TOKEN not in shown


def test_a_stopped_embedded_cluster_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no cluster runs"):
        ConnectionFields(extra={"data_dir": str(tmp_path)}).client_config()


def test_the_cluster_name_is_in_extra_or_is_the_connections_name() -> None:
    assert ConnectionFields().cluster_name("coranto_default") == "coranto_default"
    assert ConnectionFields(extra={"cluster": "prod"}).cluster_name("coranto_default") == "prod"


def test_errors_advise_in_terms_of_airflow_connections(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        ConnectionFields(extra={"data_dir": str(tmp_path)}).client_config()
    advice = with_connection_fields(str(caught.value))
    assert (
        "data_dir in the connection's extra (its directory) or the connection's host (a broker's host:port)" in advice
    )
    assert with_connection_fields("… serves with TLS (https://…, $CORANTO_TLS_CA).").endswith(
        "(https://…, tls_ca in the connection's extra)."
    )
    with pytest.raises(InvalidInput) as refused:
        StoreRegistry().get("file:///")
    assert "$" not in with_connection_fields(str(refused.value))


def test_errors_in_airflow_name_no_client_variables() -> None:
    """Errors of the client name environment variables. Each of them has a field in a connection."""
    root = Path(coranto.client.__file__).parents[1]
    files = [*(root / "client").rglob("*.py"), *(root / "cluster").glob("info.py"), root / "fragments" / "stores.py"]
    text = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"\$CORANTO_[A-Z_]+", text)) - {"$CORANTO_CLIENT_NAME"}
    assert {name for name in named if "$" in with_connection_fields(name)} == set()
