"""Options for the connection to brokers, and their conversion to the client's configuration."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coranto.client import ClientConfig
from coranto.client.config import AUTH_KINDS, AUTH_VARIABLES, DEFAULT_RETRY_TIMEOUT
from coranto.errors import InvalidInput
from coranto.security.oidc.client import OidcClient
from coranto.security.tokens import BearerToken

OPTIONS: Final = {
    "endpoint": "a broker's host:port (required)",
    "fileRoot": "folder that file:/// fragment stores are rooted at, where executors can read it",
    "retryTimeout": "seconds to retry calls while brokers cannot serve them",
    "zone": "zone of the executors, whose brokers are read from first (default: $CORANTO_ZONE of the executors)",
    "authToken": "a bearer token for brokers (default: $CORANTO_AUTH_TOKEN of the executors)",
    "authSecret": "keys to sign tokens with, as base64 (default: $CORANTO_AUTH_KEYS of the executors)",
    "oidcIssuer": "URL of a provider of tokens (default: $CORANTO_OIDC_ISSUER of the executors, as of the next four)",
    "oidcClientId": "id that the provider has given to this client",
    "oidcClientSecret": "secret of this client",
    "oidcScope": "scope of the tokens to request",
    "oidcAudience": "audience of the tokens to request",
    "tlsCa": "PEM file of the authorities to trust (default: $CORANTO_TLS_CA of the executors)",
    "tlsCert": "PEM file of the certificate that shows brokers who reads (default: $CORANTO_TLS_CERT)",
    "clientName": "name that brokers log with calls of this read or write that fail (default: $CORANTO_CLIENT_NAME)",
    "tlsKey": "PEM file of the certificate's key (default: $CORANTO_TLS_KEY)",
}

_OIDC: Final = ("oidcIssuer", "oidcClientId", "oidcClientSecret", "oidcScope", "oidcAudience")
_AUTH: Final = ("authToken", "authSecret", *_OIDC)


def client_options(config: ClientConfig) -> dict[str, str]:
    """Return the options that are equivalent to a client's configuration."""
    options = {"endpoint": config.endpoint, "retryTimeout": str(config.retry_timeout)}
    given = {"zone": config.zone, "clientName": config.name, "fileRoot": config.file_root}
    options |= {name: str(value) for name, value in given.items() if value}
    if isinstance(config.auth, BearerToken):
        options["authToken"] = config.auth.token.reveal().decode()
    elif isinstance(config.auth, OidcClient):
        options |= {name: value for name, value in zip(_OIDC, config.auth.values, strict=True) if value}
    elif config.auth is not None:
        options["authSecret"] = ",".join(b64encode(key.reveal()).decode() for key in config.auth.secrets)
    if config.tls is not None:
        files = {"tlsCa": config.tls.ca, "tlsCert": config.tls.cert, "tlsKey": config.tls.key}
        options |= {name: str(path) for name, path in files.items() if path is not None}
    return options


def client_of(given: Mapping[str, str]) -> ClientConfig:
    """Return the client's configuration for options with names in lower case. Raises InvalidInput."""
    endpoint = given.get("endpoint", "")
    if not endpoint:
        raise InvalidInput(f"is required: {OPTIONS['endpoint']}", field="option endpoint")
    root = given.get("fileroot", "")
    environment = dict(os.environ)
    auth = dict(zip(AUTH_VARIABLES, (given.get(name.lower(), "") for name in _AUTH), strict=True))
    if any(auth[kind] for kind in AUTH_KINDS):
        environment |= auth
    files = {"tlsca": "TLS_CA", "tlscert": "TLS_CERT", "tlskey": "TLS_KEY"}
    for name, variable in {"zone": "ZONE", "clientname": "CLIENT_NAME", **files}.items():
        if given.get(name):
            environment[f"CORANTO_{variable}"] = given[name]
    try:
        retry_timeout = float(given.get("retrytimeout", DEFAULT_RETRY_TIMEOUT))
    except ValueError as error:
        raise InvalidInput(
            f"{given['retrytimeout']!r} is not a number of seconds, such as 30", field="option retryTimeout"
        ) from error
    return ClientConfig.from_environment(endpoint, Path(root) if root else None, retry_timeout, environment)
