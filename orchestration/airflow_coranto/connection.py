"""Client configuration from an Airflow connection of type `coranto`. Does not import Airflow."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from coranto.errors import InvalidInput

if TYPE_CHECKING:
    from coranto.client import ClientConfig

CONNECTION_TYPE: Final = "coranto"
DEFAULT_CONNECTION: Final = "coranto_default"
_SCHEMES: Final = ("", "http", "https")
_EXTRA: Final = {
    "auth": "",
    "oidc_issuer": "CORANTO_OIDC_ISSUER",
    "oidc_client_id": "CORANTO_OIDC_CLIENT_ID",
    "oidc_scope": "CORANTO_OIDC_SCOPE",
    "oidc_audience": "CORANTO_OIDC_AUDIENCE",
    "tls_ca": "CORANTO_TLS_CA",
    "tls_cert": "CORANTO_TLS_CERT",
    "tls_key": "CORANTO_TLS_KEY",
    "zone": "CORANTO_ZONE",
    "file_root": "",
    "data_dir": "",
    "cluster": "",
}
"""The keys allowed in extra, and the environment variables that they replace, if any."""

_PASSWORDS: Final = {
    "token": "CORANTO_AUTH_TOKEN",
    "keys": "CORANTO_AUTH_KEYS",
    "oidc": "CORANTO_OIDC_CLIENT_SECRET",
}
"""The values of `auth` in extra, and the environment variables that the password replaces."""

_VARIABLE_FIELDS: Final = {
    **{f"${variable}": f"{name} in the connection's extra" for name, variable in _EXTRA.items() if variable},
    "$CORANTO_AUTH_TOKEN": "the connection's password",
    "$CORANTO_AUTH_KEYS": "the connection's password with auth = keys in its extra",
    "$CORANTO_OIDC_CLIENT_SECRET": "the connection's password",
    "$CORANTO_FILE_ROOT": "file_root in the connection's extra",
    "$CORANTO_DATA": "data_dir in the connection's extra",
    "$CORANTO_ENDPOINT": "the connection's host",
}
"""Environment variables in error texts, and the corresponding fields of an Airflow connection."""


def how_to_define(conn_id: str) -> str:
    """Return the error text for an undefined connection, with a command that defines it."""
    # Shells cannot export variables with other names.
    line = (
        f"export AIRFLOW_CONN_{conn_id.upper()}="
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", conn_id)
        else f"airflow connections add {shlex.quote(conn_id)} --conn-uri "
    )
    return (
        f"connection {conn_id!r} is not defined. Define it: {line}'coranto://HOST:PORT' (with a token: "
        f"coranto://:TOKEN@HOST:PORT/https), or for the cluster that `coranto up` runs here: {line}'coranto://'"
    )


def with_connection_fields(text: str) -> str:
    """Return an error text with the names of Airflow connection fields instead of environment variables."""
    for name, field_name in _VARIABLE_FIELDS.items():
        text = text.replace(name, field_name)
    return text


@dataclass(frozen=True, slots=True)
class ConnectionFields:
    """The fields of a connection.

    | field | meaning |
    |---|---|
    | host | brokers, separated by commas, each with or without a port; empty: see `coranto.cluster.client_config` |
    | port | the default port of brokers |
    | schema | `https` for TLS, `http` or empty without TLS |
    | password | a bearer token; with `auth=keys` in extra, keys to sign tokens; with `auth=oidc`, a client secret |
    | extra | see below |

    Extra may have `auth` (`token`, `keys` or `oidc`), the client of an OpenID Connect provider (`oidc_issuer`,
    `oidc_client_id`, `oidc_scope` and `oidc_audience`), `tls_ca`, `tls_cert` and `tls_key` (PEM files), `zone`,
    `file_root`, `data_dir` (of an embedded cluster), and `cluster` (the cluster's name in asset URIs).
    """

    host: str = field(default="", repr=False)
    port: int | None = None
    schema: str = ""
    login: str = field(default="", repr=False)
    """Must be empty. A value may be a token in the wrong field."""
    password: str = field(default="", repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def endpoint(self) -> str:
        """The endpoints, separated by commas; empty if no host is given. Raises InvalidInput, which shows no secret."""
        if self.schema not in _SCHEMES:
            raise InvalidInput(f"{self.schema!r} is not http or https; leave it empty for no TLS", field="schema")
        if self.login or "@" in self.host:
            raise InvalidInput("brokers have no users; a token is the password: coranto://:TOKEN@HOST", field="host")
        return ",".join(self._one(each.strip()) for each in self.host.split(",") if each.strip())

    def _one(self, host: str) -> str:
        if "://" in host:
            return host
        has_port = host.rpartition(":")[2].isdecimal() and (host.count(":") == 1 or "]:" in host)
        address = host if has_port or self.port is None else f"{host}:{self.port}"
        return f"{self.schema}://{address}" if self.schema else address

    def client_config(self) -> ClientConfig:
        """Return the configuration of a client.

        Raises InvalidInput for invalid fields, and ClusterError if no endpoint is given and no local cluster runs.
        Error texts do not contain the password.
        """
        from coranto.cluster.client_config import resolve_client_config

        extra = self._known_extra()
        kind = extra.get("auth") or "token"
        if kind not in _PASSWORDS:
            # The value may be a token in the wrong field, so the error does not show it.
            raise InvalidInput("it must be token, keys or oidc; the secret itself is the password", field="extra.auth")
        settings = {name: extra.get(key, "") for key, name in _EXTRA.items() if name}
        if (kind == "oidc") != bool(extra.get("oidc_issuer")) or (kind == "oidc" and not self.password):
            raise InvalidInput(
                "an OpenID Connect provider needs auth = oidc and oidc_issuer, and the client secret as password",
                field="extra.auth",
            )
        return resolve_client_config(
            self.endpoint,
            data_dir=extra.get("data_dir", ""),
            file_root=extra.get("file_root", ""),
            settings={**settings, _PASSWORDS[kind]: self.password},
        )

    def cluster_name(self, conn_id: str) -> str:
        """Return the cluster's name in asset URIs and lineage: `cluster` of extra, otherwise the connection's id."""
        return self._known_extra().get("cluster") or conn_id

    def _known_extra(self) -> dict[str, str]:
        unknown = sorted(set(self.extra) - set(_EXTRA))
        if unknown:
            raise InvalidInput(f"{', '.join(unknown)} is unknown; known are {', '.join(_EXTRA)}", field="extra")
        known = {name: str(value) for name, value in self.extra.items() if value not in (None, "")}
        for name in ("tls_ca", "tls_cert", "tls_key"):
            if "-----BEGIN" in known.get(name, ""):
                # Airflow masks only the password, so the error does not show this value.
                raise InvalidInput("it holds PEM text; save that as a file, and give its path", field=f"extra.{name}")
        return known
