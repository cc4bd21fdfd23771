"""Admission of calls by their tokens: the capability that each RPC needs, and the claims of each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from coranto.effects import Clock
from coranto.errors import CorantoError, Unauthenticated, Unavailable
from coranto.security.tokens import HEADER, LEEWAY_SECONDS, Capability, Claims, Keys, bearer_of, require, verify

if TYPE_CHECKING:
    from coranto.security.oidc.provider import Provider

UNRESTRICTED: Final = Claims(Capability.ALL)
"""The claims of callers when there are no keys, and of the server itself."""


def caller_of(claims: Claims, peer: str) -> str:
    """Return a text that identifies a caller for limits: by its token, or else by its address in gRPC's form."""
    if claims is not UNRESTRICTED:
        return claims.identity
    return f"the caller at {peer.rpartition(':')[0] if peer.startswith(('ipv4:', 'ipv6:')) else peer}"


class TokenExpired(CorantoError):
    """A call was ended because its token expired. The caller may continue with another token."""


class KeysNotFetched(Unavailable):
    """The provider's key for a call's token has not been fetched yet. The call had no effect, and may be retried."""


class Authorizer:
    """Admits calls by their tokens."""

    def __init__(
        self, keys: Keys | None, clock: Clock, rules: Mapping[str, Capability], provider: Provider | None = None
    ) -> None:
        """Create an authorizer. Tokens of `provider` are accepted in addition to tokens signed with `keys`.

        `rules` maps each method to the capability that it needs. A method without a rule cannot be served.

        Without keys every caller may do everything.
        """
        self._keys = keys
        self._provider = provider
        self._clock = clock
        self._rules = rules

    @property
    def admits_all(self) -> bool:
        """True if every caller may do everything, under UNRESTRICTED claims."""
        return self._keys is None

    @property
    def epoch(self) -> int:
        """A number that changes when valid tokens may have become invalid."""
        return self._provider.epoch if self._provider is not None else 0

    @asynccontextmanager
    async def admitted(self, method: str, context: Any) -> AsyncIterator[Claims]:
        """Serve a call under the claims of its token, while they are valid.

        Raises Unauthenticated and PermissionDenied. Raises TokenExpired when the claims expire before the call has been
        served. Its work is then cancelled, as if the caller had disconnected.
        """
        capability = self._rules[method]
        if self._keys is None:
            yield UNRESTRICTED
            return
        metadata = context.invocation_metadata() or ()
        claims = self.claims_of(bearer_of(value for name, value in metadata if name == HEADER), capability)
        left = claims.exp + LEEWAY_SECONDS - self._clock.now()
        try:
            async with asyncio.timeout(left if claims is not UNRESTRICTED else None) as timeout:
                yield claims
        except TimeoutError:
            if timeout.expired():
                raise TokenExpired("the call's token has expired; call again with another") from None
            raise

    def claims_of(self, token: str | None, capability: Capability) -> Claims:
        """Return the claims of a token, which must have `capability`.

        Raises Unauthenticated, PermissionDenied, and KeysNotFetched.
        """
        if self._keys is None or (token is None and self._keys.accept_missing):
            return UNRESTRICTED
        if token is None:
            raise Unauthenticated("a token is needed: send the metadata `authorization: Bearer <token>`")
        now = self._clock.now()
        claims = self._provider.verify(token, now) if self._provider is not None else None
        if claims is None:
            claims = verify(token, self._keys, now)
        require(claims, capability)
        return claims
