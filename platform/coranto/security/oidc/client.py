"""A client's tokens of an OpenID Connect provider: by its secret, or by the login of a person (`coranto login`)."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from typing import Any, Final

import structlog

from coranto.errors import CorantoError, InvalidInput, Unauthenticated, Unavailable
from coranto.extras import require
from coranto.security.oidc.http import Discovery, Response, discover, request, require_private_url
from coranto.security.tokens import Claims, Secret

_FRESH_PART: Final = 2 / 3
"""The fraction of a token's lifetime after which it is renewed. Failed renewals are retried in the rest."""
_DEFAULT_SECONDS: Final = 300.0
"""The assumed lifetime of a token if the provider states none."""
_MAX_SECONDS: Final = 86400.0
_DROP_SECONDS: Final = 10.0
"""A rejected token that is younger than this is kept: a new one would be rejected, too."""
_MAX_BACKOFF: Final = 60.0
_BUSY: Final = frozenset(["server_error", "temporarily_unavailable", "slow_down"])

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OidcClient:
    """A client that is registered at a provider. As `auth` of a client of brokers, it provides and renews tokens.

    With a `secret` it gets tokens for itself (client credentials). Without a secret it uses the login of this user,
    which `coranto login` stores. `scope` and `audience` are sent to the provider if they are given.
    """

    issuer: str
    client_id: str
    secret: Secret | None = None
    scope: str = ""
    audience: str = ""

    def __post_init__(self) -> None:
        require_private_url(self.issuer, "OIDC issuer")
        if not self.client_id:
            raise InvalidInput("is empty; give the id that the provider has given to this client", field="OIDC client")

    @property
    def values(self) -> tuple[str, str, str, str, str]:
        """The fields as text, the secret included, in their order."""
        secret = self.secret.reveal().decode() if self.secret is not None else ""
        return self.issuer, self.client_id, secret, self.scope, self.audience

    def bearer(self, claims: Claims) -> str:
        """Return the current token. The claims that the call needs are ignored. Raises Unavailable without a token."""
        return source_of(self).token()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens in one response of a provider. Times are Unix seconds."""

    access: Secret
    issued: float
    expires: float
    refresh: Secret | None = None

    @property
    def renew_at(self) -> float:
        return self.issued + (self.expires - self.issued) * _FRESH_PART


@functools.lru_cache(maxsize=256)
def source_of(client: OidcClient) -> TokenSource:
    """Return the source of a client's tokens, which all connections of this process share."""
    return TokenSource(client)


class TokenSource:
    """The current token of a client. Calls that need a token renew it before it expires."""

    def __init__(self, client: OidcClient) -> None:
        """Raises MissingExtra without the extra `oidc`."""
        require("oidc", "aiohttp", "oauthlib")
        self._client = client
        self._held: Tokens | None = None
        self._error: CorantoError | None = None
        self._failures = 0
        self._try_at = 0.0
        self._renewals: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    @property
    def is_fresh(self) -> bool:
        """True if the token need not be renewed yet."""
        return self._held is not None and time.time() < self._held.renew_at

    @property
    def _is_valid(self) -> bool:
        return self._held is not None and time.time() < self._held.expires

    def token(self) -> str:
        """Return the current token. Raises Unavailable if there is none."""
        if self._held is None:
            raise Unavailable(f"this client has not received a token from {self._client.issuer} yet; try again")
        return self._held.access.reveal().decode()

    def drop(self) -> bool:
        """Drop the token, so that it is renewed before the next call. Return False, and keep it, if it is new."""
        if self._held is not None and time.time() - self._held.issued <= _DROP_SECONDS:
            return False
        self._held = None
        return True

    async def ready(self) -> None:
        """Ensure that there is a valid token. Waits for the provider only if there is none.

        Raises Unauthenticated if the provider rejects the request, and Unavailable if it does not respond.
        """
        if self.is_fresh:
            return
        loop = asyncio.get_running_loop()
        renewal = self._renewals.get(loop)
        if renewal is None and time.time() >= self._try_at:
            renewal = self._renewals[loop] = loop.create_task(self._renew(), name="renew the OpenID Connect token")
            renewal.add_done_callback(lambda _: self._renewals.pop(loop, None))
        if self._is_valid:
            return
        if renewal is not None:
            await asyncio.shield(renewal)
        if not self._is_valid and self._error is not None:
            raise type(self._error)(str(self._error))

    async def _renew(self) -> None:
        try:
            self._held, self._error = await self._next(), None
            self._failures, self._try_at = 0, 0.0
        except (Unauthenticated, Unavailable) as error:
            self._error = error
            self._failures += 1
            self._try_at = time.time() + min(2.0 ** (self._failures - 1), _MAX_BACKOFF)
            if self._is_valid:  # Otherwise calls raise it.
                _log.warning("oidc.token_not_renewed", issuer=self._client.issuer, error=str(error))

    async def _next(self) -> Tokens:
        client = self._client
        if client.secret is None:
            from coranto.security.oidc.login import tokens_of_login

            return await tokens_of_login(client)
        from oauthlib.oauth2 import BackendApplicationClient

        oauth = BackendApplicationClient(client.client_id)
        return await token_request(client, oauth, oauth.prepare_request_body, await discover(client.issuer))


async def token_request(client: OidcClient, oauth: Any, prepare: Any, discovery: Discovery, **given: str) -> Tokens:
    """Request tokens. `oauth` is oauthlib's client, and `prepare` its method that creates the body of the request.

    Raises Unauthenticated with the provider's reason if it rejects the request, and Unavailable if it does not respond.
    """
    body, credentials = body_of(client, discovery, prepare, **given)
    url = discovery.endpoint("token_endpoint")
    begun = time.time()
    return tokens_of(url, oauth, await request(url, body, credentials), begun)


def body_of(client: OidcClient, discovery: Discovery, prepare: Any, **given: str) -> tuple[str, tuple[str, str] | None]:
    """Return the body of a request, and the credentials to send with it."""
    given |= {name: value for name in ("scope", "audience") if (value := getattr(client, name))}
    credentials = None
    if client.secret is not None:
        secret = client.secret.reveal().decode()
        methods = discovery.content.get("token_endpoint_auth_methods_supported")
        if isinstance(methods, list) and "client_secret_basic" not in methods:
            given["client_secret"] = secret
        else:
            credentials = client.client_id, secret
    return prepare(include_client_id=credentials is None, **given), credentials


def tokens_of(url: str, oauth: Any, response: Response, now: float) -> Tokens:
    """Return the tokens in a response. Raises Unauthenticated and Unavailable, which show no token."""
    from oauthlib.oauth2 import OAuth2Error

    if response.status >= 500:
        raise Unavailable(f"{url} answered with status {response.status}")
    try:
        content = oauth.parse_request_body_response(response.text)
        seconds = float(content.get("expires_in") or _DEFAULT_SECONDS)
    except OAuth2Error as error:
        reason = "".join(each if each.isprintable() else " " for each in f"{error.error}: {error.description or ''}")
        kind = Unavailable if error.error in _BUSY else Unauthenticated
        raise kind(f"{url} gave no token ({reason[:300].rstrip(': ')})") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Unavailable(f"{url} did not answer as the token endpoint of a provider does") from None
    access, refresh = content.get("access_token"), content.get("refresh_token")
    if str(content.get("token_type", "bearer")).lower() != "bearer" or not _is_token(access) or not seconds > 0:
        raise Unavailable(f"{url} did not answer with a bearer token")
    kept = Secret(refresh) if isinstance(refresh, str) and refresh else None
    return Tokens(Secret(access), now, now + min(seconds, _MAX_SECONDS), kept)


def _is_token(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isascii() and value.isprintable() and " " not in value
