"""The configuration of a client by an orchestrator's settings, the environment, or the running cluster."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from coranto.cluster.client_config import resolve_client_config
from coranto.cluster.info import ClusterInfo, save
from coranto.errors import ClusterError
from coranto.security.oidc.client import OidcClient
from coranto.security.tokens import Keys, Secret

KEY = base64.b64encode(b"k" * 32).decode()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in os.environ if each.startswith("CORANTO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_a_setting_precedes_the_environment_and_the_running_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(ClusterInfo(tmp_path, "", "/p", ("127.0.0.1:1", "127.0.0.1:2"), tmp_path / "files", {"cluster": os.getpid()}))
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path))
    found = resolve_client_config()
    assert (found.endpoint, found.file_root) == ("127.0.0.1:1,127.0.0.1:2", tmp_path / "files")
    monkeypatch.setenv("CORANTO_ENDPOINT", "127.0.0.1:3")
    monkeypatch.setenv("CORANTO_FILE_ROOT", "/of/the/environment")
    found = resolve_client_config()
    assert (found.endpoint, found.file_root) == ("127.0.0.1:3", Path("/of/the/environment"))
    found = resolve_client_config("127.0.0.1:4", file_root="/given")
    assert (found.endpoint, found.file_root) == ("127.0.0.1:4", Path("/given"))
    assert resolve_client_config(data_dir=str(tmp_path)).endpoint == "127.0.0.1:1,127.0.0.1:2"


def test_given_tokens_or_keys_replace_both_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORANTO_AUTH_TOKEN", "a.b.c")
    plain = resolve_client_config("127.0.0.1:1")
    given = resolve_client_config("127.0.0.1:1", settings={"CORANTO_AUTH_KEYS": KEY, "CORANTO_AUTH_TOKEN": ""})
    assert plain.auth is not None
    assert given.auth is not None
    assert type(plain.auth) is not type(given.auth)
    assert resolve_client_config("127.0.0.1:1", settings={"CORANTO_AUTH_KEYS": ""}).auth == plain.auth


def test_a_given_issuer_replaces_the_environment_and_other_fields_complete_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CORANTO_AUTH_KEYS", KEY)
    given = {"CORANTO_OIDC_ISSUER": "https://login.example", "CORANTO_OIDC_CLIENT_ID": "one"}
    assert resolve_client_config("127.0.0.1:1", settings=given).auth == OidcClient("https://login.example", "one")
    monkeypatch.delenv("CORANTO_AUTH_KEYS")
    for name, value in {"ISSUER": "https://other.example", "CLIENT_ID": "two", "CLIENT_SECRET": "s"}.items():
        monkeypatch.setenv(f"CORANTO_OIDC_{name}", value)
    assert resolve_client_config("127.0.0.1:1").auth == OidcClient("https://other.example", "two", Secret("s"))
    other = resolve_client_config("127.0.0.1:1", settings={"CORANTO_OIDC_CLIENT_SECRET": "t", "CORANTO_OIDC_SCOPE": ""})
    assert other.auth == OidcClient("https://other.example", "two", Secret("t"))
    # A given issuer gets no secret of the environment.
    assert resolve_client_config("127.0.0.1:1", settings=given).auth == OidcClient("https://login.example", "one")
    assert resolve_client_config("127.0.0.1:1", settings={"CORANTO_AUTH_KEYS": KEY}).auth == Keys.parse(KEY)


def test_without_an_endpoint_the_error_says_how_to_start_a_cluster() -> None:
    with pytest.raises(ClusterError, match="coranto up"):
        resolve_client_config()
