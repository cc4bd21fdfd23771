"""Tokens for calls: each grants only the capability and the journals that its call needs."""

from __future__ import annotations

from coranto.effects import Clock
from coranto.security.oidc.client import OidcClient, source_of
from coranto.security.tokens import HEADER, TOKEN_SECONDS, Auth, Capability, Keys, claims_for, scope_of
from coranto.wire import protocol_pb2 as pb

Metadata = tuple[tuple[str, str], ...]

_MAX_KEPT = 1024


class CallTokens:
    """Creates the metadata that authorizes calls; None without `auth`."""

    def __init__(self, auth: Auth | None, clock: Clock, subject: str = "") -> None:
        """`subject` names the caller in tokens that it signs."""
        self.auth = auth
        self._subject = subject
        self._clock = clock
        self._source = source_of(auth) if isinstance(auth, OidcClient) else None
        self._kept: dict[tuple[Capability, str], tuple[float, Metadata | None]] = {}

    @property
    def are_ready(self) -> bool:
        """True if `ready` has nothing to do."""
        return self._source is None or self._source.is_fresh

    async def ready(self) -> None:
        """Ensure a valid token, if `auth` has a provider. Waits only if there is none; otherwise renews it if due.

        Raises Unauthenticated if the provider rejects the request, and Unavailable if it does not respond.
        """
        if self._source is not None:
            await self._source.ready()

    def drop_rejected(self) -> bool:
        """Drop a token that a server has rejected. Return True if the call may be retried with a new token."""
        return self._source is not None and self._source.drop()

    def for_journal(self, capability: Capability, journal: str) -> Metadata | None:
        """Return the metadata for a call about one journal. A token is reused for half of its lifetime."""
        if self.auth is None:
            return None
        if not isinstance(self.auth, Keys):
            return self.for_selector(capability, pb.LabelSelector())
        now = self._clock.now()
        made, metadata = self._kept.get((capability, journal), (now - TOKEN_SECONDS, None))
        if not made <= now < made + TOKEN_SECONDS / 2:
            metadata = self.for_selector(capability, scope_of((journal,)))
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[capability, journal] = now, metadata
        return metadata

    def for_selector(
        self, capability: Capability, selector: pb.LabelSelector, seconds: float = TOKEN_SECONDS
    ) -> Metadata | None:
        """Return the metadata for a call about the journals that `selector` matches."""
        if self.auth is None:
            return None
        claims = claims_for(capability, selector, self._clock.now(), seconds, self._subject)
        return ((HEADER, f"Bearer {self.auth.bearer(claims)}"),)
