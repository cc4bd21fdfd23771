"""The login of a person: the device flow, and the file that stores its tokens for later commands of this user."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from coranto.errors import CorantoError, InvalidInput, Unauthenticated, Unavailable
from coranto.security.oidc.client import OidcClient, Tokens, body_of, token_request, tokens_of
from coranto.security.oidc.http import discover, json_of, request
from coranto.security.tokens import Secret

_INTERVAL: Final = 5.0
"""The default interval between polls in seconds, and its increase after `slow_down` (RFC 8628)."""
_MAX_INTERVAL: Final = 60.0
_MAX_LOGIN_SECONDS: Final = 1800.0


def login_file(client: OidcClient) -> Path:
    """Return the file of this user's login at a client's provider."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    name = hashlib.sha256(f"{client.issuer}\n{client.client_id}".encode()).hexdigest()[:16]
    return base / "coranto" / "logins" / f"{name}.json"


async def log_in(client: OidcClient, show: Callable[[str, str], None]) -> Path:
    """Let a person log in at the provider on another device, and store the tokens. Returns their file.

    `show` receives the provider's URL and the code to enter there. Raises Unauthenticated if the person or the provider
    refuses, or the code expires; and Unavailable.
    """
    from oauthlib.oauth2 import DeviceClient, OAuth2Error

    discovery = await discover(client.issuer)
    if "device_authorization_endpoint" not in discovery.content:
        raise InvalidInput(
            f"{client.issuer} has no device flow; set $CORANTO_OIDC_CLIENT_SECRET, or give a token in "
            "$CORANTO_AUTH_TOKEN",
            field="OIDC issuer",
        )
    oauth = DeviceClient(client.client_id)
    url = discovery.endpoint("device_authorization_endpoint")
    begun = json_of(url, await request(url, *body_of(client, discovery, partial(_form, client.client_id))))
    code, shown, person = (begun.get(name) for name in ("device_code", "verification_uri", "user_code"))
    if not all(isinstance(each, str) and each for each in (code, shown, person)):
        raise Unauthenticated(f"{url} did not answer as a provider does: it gave no code to enter")
    show(str(begun.get("verification_uri_complete") or shown), str(person))
    interval = min(_seconds(begun.get("interval"), _INTERVAL), _MAX_INTERVAL)
    until = time.monotonic() + min(_seconds(begun.get("expires_in"), _MAX_LOGIN_SECONDS), _MAX_LOGIN_SECONDS)
    token_url = discovery.endpoint("token_endpoint")
    body, credentials = body_of(client, discovery, partial(oauth.prepare_request_body, code))
    while time.monotonic() < until:
        await asyncio.sleep(interval)
        response = await request(token_url, body, credentials)
        try:
            oauth.parse_request_body_response(response.text)
        except OAuth2Error as error:
            if error.error == "slow_down":
                interval = min(interval + _INTERVAL, _MAX_INTERVAL)
                continue
            if error.error == "authorization_pending":
                continue
        except ValueError:  # `tokens_of` raises the error.
            pass
        tokens = tokens_of(token_url, oauth, response, time.time())
        path = login_file(client)
        async with _locked(path):
            _write(path, tokens)
        return path
    raise Unauthenticated("the code was not entered in time; log in again")


async def tokens_of_login(client: OidcClient) -> Tokens:
    """Return the tokens of this user's login, renewed if due. Raises Unauthenticated without a login."""
    from oauthlib.oauth2 import DeviceClient

    path = login_file(client)
    # One process renews at a time: a provider may accept each refresh token only once.
    async with _locked(path):
        tokens = _read(path)
        if time.time() < tokens.renew_at:
            return tokens
        is_valid = time.time() < tokens.expires
        if tokens.refresh is None:
            if is_valid:
                return tokens
            raise Unauthenticated(f"the login at {client.issuer} has expired; run `coranto login`")
        oauth, old = DeviceClient(client.client_id), tokens.refresh
        prepare = partial(oauth.prepare_refresh_body, refresh_token=old.reveal().decode(), client_id=client.client_id)
        try:
            renewed = await token_request(client, oauth, prepare, await discover(client.issuer))
        except Unauthenticated as error:
            raise Unauthenticated(f"the login has ended: {error}; run `coranto login`") from None
        except Unavailable:
            if is_valid:
                return tokens
            raise
        tokens = Tokens(renewed.access, renewed.issued, renewed.expires, renewed.refresh or old)
        _write(path, tokens)
        return tokens


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Lock the file against other processes during the block."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CorantoError(f"the login cannot be kept: {error.filename}: {error.strerror}") from error
    try:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _read(path: Path) -> Tokens:
    try:
        content = json.loads(path.read_bytes())
        refresh = content["refresh_token"]
        return Tokens(
            Secret(str(content["access_token"])),
            float(content["issued"]),
            float(content["expires"]),
            Secret(str(refresh)) if refresh else None,
        )
    except FileNotFoundError:
        raise Unauthenticated("there is no login; run `coranto login`, or set $CORANTO_OIDC_CLIENT_SECRET") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise Unauthenticated(f"the login in {path} cannot be read; run `coranto login`") from None


def _write(path: Path, tokens: Tokens) -> None:
    content = {
        "access_token": tokens.access.reveal().decode(),
        "refresh_token": tokens.refresh.reveal().decode() if tokens.refresh is not None else "",
        "issued": tokens.issued,
        "expires": tokens.expires,
    }
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(content, file)
    new.replace(path)


def _form(client_id: str, *, include_client_id: bool, **given: str) -> str:
    return urlencode({**given, **({"client_id": client_id} if include_client_id else {})})


def _seconds(value: Any, default: float) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return default
    return seconds if seconds > 0 else default
