"""The options of webhooks: `source: {webhook: …}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import yaml

from coranto.errors import InvalidInput
from coranto.ingest.option_fields import checked, choice, integer, required, seconds, text, texts
from coranto.ingest.webhook.signatures import SCHEMES, Scheme
from coranto.security.tls import is_loopback
from coranto.specs.yaml_fields import entries_of, line_error, line_of

_FIELDS: Final = ("listen", "path", "signature", "window", "body", "memory", "requests", "receive", "timeout")
_SIGNATURE: Final = ("scheme", "header", "secrets", "secret_file")
_UNSIGNED: Final = "none"
_MIB: Final = 1 << 20
WINDOW_SECONDS: Final = 7 * 86400.0
MAX_KEYS: Final = 500_000
"""The maximum number of keys in a window. Each takes about 32 bytes of one progress record."""


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """The requests that a gateway accepts, and the limits of their number and size."""

    host: str
    port: int
    path: str = "/"
    scheme: Scheme | None = None
    """The scheme of signatures; None if requests are not signed."""
    secrets: tuple[str, ...] = ()
    secret_file: Path | None = None
    window_seconds: float = 3600.0
    """The time to remember a key."""
    window_keys: int = 200_000
    body_bytes: int = 4 * _MIB
    memory_bytes: int = 64 * _MIB
    """The maximum bytes of all bodies in memory."""
    requests: int = 1000
    """The maximum number of connections."""
    receive_seconds: float = 10.0
    """The timeout for receiving a request."""
    commit_seconds: float = 30.0
    """The timeout for committing a request."""

    @property
    def without_schema(self) -> str:
        return "requests"

    def keys(self) -> tuple[bytes, ...]:
        """Return the configured secrets, and the secrets that the file has now. Raises InvalidInput."""
        found = [each.encode() for each in self.secrets]
        if self.secret_file is not None:
            try:
                found += [each.strip() for each in self.secret_file.read_bytes().splitlines() if each.strip()]
            except OSError as error:
                raise InvalidInput(f"the file of secrets {self.secret_file} cannot be read: {error.strerror}") from None
        if not found:
            raise InvalidInput("there is no secret to verify signatures with: add `secrets` or `secret_file`")
        return tuple(found)


def read_webhook(node: yaml.Node) -> WebhookOptions:
    """Read the options of webhooks. Raises InvalidInput, with the line."""
    entries = entries_of(node, _FIELDS)
    required(node, entries, "listen")
    host, port = checked(entries["listen"], _address)
    window = entries_of(entries["window"], ("seconds", "keys")) if "window" in entries else {}
    body = integer(entries, "body", 1, 64 * _MIB, 4 * _MIB)
    memory = integer(entries, "memory", _MIB, 64 << 30, 64 * _MIB)
    if 2 * body > memory:
        named = entries.get("memory", entries.get("body", node))
        raise line_error(line_of(named), f"memory is {memory}; it must be twice the largest body of {body} or more")
    options = WebhookOptions(
        host,
        port,
        checked(entries["path"], _path) if "path" in entries else "/",
        window_seconds=seconds(window, "seconds", 3600.0, WINDOW_SECONDS),
        window_keys=integer(window, "keys", 1, MAX_KEYS, 200_000),
        body_bytes=body,
        memory_bytes=memory,
        requests=integer(entries, "requests", 1, 100_000, 1000),
        receive_seconds=seconds(entries, "receive", 10.0),
        commit_seconds=seconds(entries, "timeout", 30.0),
    )
    if "signature" in entries:
        return _signed(options, entries["signature"])
    if not is_loopback(host):
        raise line_error(
            line_of(entries["listen"]),
            f"{host} can be reached by others: add `signature`, with `scheme: {_UNSIGNED}` if anyone may send events",
        )
    return options


def _signed(options: WebhookOptions, node: yaml.Node) -> WebhookOptions:
    entries: Mapping[str, yaml.Node] = entries_of(node, _SIGNATURE)
    required(node, entries, "scheme")
    name = choice(entries, "scheme", ("hmac", *(each for each in SCHEMES if each != "hmac"), _UNSIGNED))
    if name == _UNSIGNED:
        return options
    secrets = texts(entries, "secrets")
    if "secrets" in entries and not all(secrets):
        raise line_error(line_of(entries["secrets"]), "a secret is empty")
    if ("secrets" in entries) == ("secret_file" in entries):
        raise line_error(line_of(node), "give either `secrets` or `secret_file`")
    if "header" in entries and name != "hmac":
        raise line_error(line_of(entries["header"]), f"{name} has a header of its own: leave `header` out")
    scheme = SCHEMES[name]
    if "header" in entries:
        scheme = replace(scheme, header=text(entries, "header"))
    file = Path(text(entries, "secret_file")) if "secret_file" in entries else None
    return replace(options, scheme=scheme, secrets=secrets, secret_file=file)


def _address(given: str) -> tuple[str, int]:
    host, _, port = given.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidInput(f"{given!r} is not an address; give host:port, such as 127.0.0.1:8600")
    return host.strip("[]") or "127.0.0.1", int(port)


def _path(given: str) -> str:
    if not given.startswith("/") or given in ("/live", "/ready"):
        raise InvalidInput(f"{given!r} is not a path; it begins with / and is neither /live nor /ready")
    return given
