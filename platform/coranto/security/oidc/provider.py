"""Verification of a provider's tokens. Its keys are fetched in the background, never by a call."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

import jwt
import structlog

from coranto.errors import PermissionDenied, Unauthenticated, Unavailable
from coranto.security.admission import KeysNotFetched
from coranto.security.oidc.grants import Algorithm, ProviderFile
from coranto.security.oidc.http import discover, json_of, request
from coranto.security.tokens import Claims, claims_of, json_object, require_valid

REFRESH_SECONDS: Final = 300.0
"""The interval between fetches of keys."""
MIN_REFRESH_SECONDS: Final = 5.0
"""The minimum time between two fetches. A token with an unknown key causes a fetch, but not more often than this."""
_MAX_BACKOFF: Final = 60.0
_MAX_KEYS: Final = 100
_MAX_UNKNOWN: Final = 1024
_MAX_KEY_ID: Final = 256
_ASYMMETRIC: Final = frozenset(get_args(Algorithm))
_TYPES: Final = frozenset(["jwt", "at+jwt", "application/at+jwt"])
"""The types of tokens that grant access, in lower case. A logout token, for example, has another type."""
_OF_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "RSA": frozenset(["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]),
    "P-256": frozenset(["ES256"]),
    "P-384": frozenset(["ES384"]),
    "P-521": frozenset(["ES512"]),
    "Ed25519": frozenset(["EdDSA"]),
}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Key:
    """A public key of the provider, and the algorithms that it may be used with."""

    id: str
    algorithms: frozenset[str]
    public: Any


class Provider:
    """An OpenID Connect provider. `start` begins to fetch its keys, on the event loop that verifies tokens."""

    def __init__(
        self,
        file: ProviderFile,
        *,
        refresh_seconds: float = REFRESH_SECONDS,
        min_refresh_seconds: float = MIN_REFRESH_SECONDS,
    ) -> None:
        self.file = file
        self.epoch = 0
        """Changes whenever the keys change."""
        self._refresh_seconds = refresh_seconds
        self._min_refresh_seconds = min_refresh_seconds
        self._algorithms = frozenset(file.algorithms)
        self._jws = jwt.PyJWS(algorithms=sorted(_ASYMMETRIC), options={"enforce_minimum_key_length": True})
        self._keys: dict[str, Key] = {}
        self._document = ""
        self._began = time.monotonic()
        self._fetched: float | None = None
        self._fetch_begun = 0.0  # When the fetch of the current keys began.
        self._unknown: OrderedDict[str, float] = OrderedDict()  # Key ids, and when each was first requested.
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._verified = functools.lru_cache(maxsize=1024)(self._read)

    # -- Verification ------------------------------------------------------------------------------------------------

    def verify(self, token: str, now: float) -> Claims | None:
        """Return the claims of a token, with the rights of its grant, if it is valid at `now`.

        Returns None if the token is not signed with a public-key algorithm. Raises Unauthenticated, PermissionDenied if
        no grant matches, and KeysNotFetched.
        """
        try:
            header = self._jws.get_unverified_header(token)
        except (jwt.PyJWTError, UnicodeError, ValueError, RecursionError):
            return None
        algorithm, kind = header.get("alg"), header.get("typ")
        if not isinstance(algorithm, str) or algorithm not in _ASYMMETRIC:
            return None
        if algorithm not in self._algorithms:
            allowed = ", ".join(self.file.algorithms)
            raise Unauthenticated(f"the token is signed with {algorithm}, and this cluster accepts {allowed}")
        if kind is not None and (not isinstance(kind, str) or kind.lower() not in _TYPES):
            raise Unauthenticated("the token is of a type that grants no access; get an access token")
        key = self._key(header.get("kid"))
        if algorithm not in key.algorithms:
            raise Unauthenticated(f"the token's key is not for {algorithm}")
        claims, not_before = self._verified(token, key, algorithm)
        require_valid(claims, not_before, now)
        return claims

    def _key(self, key_id: object) -> Key:
        """Return the key of this id; an unknown id triggers a fetch. Raises Unauthenticated and KeysNotFetched."""
        if not isinstance(key_id, str) or not 0 < len(key_id) <= _MAX_KEY_ID:
            raise Unauthenticated("the token does not name its key (`kid`)")
        now = time.monotonic()
        if self._fetched is None or now - self._fetched > self.file.offline_seconds:
            self._wanted.set()
            raise KeysNotFetched(f"the keys of {self.file.issuer} cannot be fetched at the moment; try again")
        key = self._keys.get(key_id)
        if key is not None:
            return key
        self._wanted.set()
        asked = self._unknown.setdefault(key_id, now)
        if len(self._unknown) > _MAX_UNKNOWN:
            self._unknown.popitem(last=False)
        if asked < self._fetch_begun:
            raise Unauthenticated(f"the token's key is not one of {self.file.issuer}")
        raise KeysNotFetched(
            f"the token's key is not known yet, and the keys of {self.file.issuer} are being fetched; try again"
        )

    def _read(self, token: str, key: Key, algorithm: str) -> tuple[Claims, float]:
        """Return a token's verified claims and the begin of their validity. Cached, because clients reuse tokens."""
        try:
            payload = self._jws.decode(token, key.public, algorithms=[algorithm])
        except jwt.InvalidSignatureError:
            raise Unauthenticated("the token's signature is not by the key that it names") from None
        except (jwt.PyJWTError, UnicodeError, ValueError, TypeError):
            # The library's error may quote the token.
            raise Unauthenticated("the token is not a JWT that its key can verify") from None
        content = json_object(payload)
        if content.get("iss") != self.file.issuer:
            raise Unauthenticated(f"the token is not by the issuer {self.file.issuer}")
        audience = content.get("aud")
        if self.file.audience not in (audience if isinstance(audience, list) else [audience]):
            raise Unauthenticated(f"the token is not for the audience {self.file.audience!r}; get one for this cluster")
        rights = self.file.rights_of(content)
        if rights is None:
            raise PermissionDenied("the token's claims match no grant of this cluster; ask its operator for one")
        return claims_of(content, *rights)

    # -- Keys --------------------------------------------------------------------------------------------------------

    @property
    def age(self) -> float:
        """The seconds since the keys were fetched, or since the start if they were not fetched yet."""
        return time.monotonic() - (self._began if self._fetched is None else self._fetched)

    def start(self) -> None:
        """Start to fetch keys in the background, until `close`."""
        self._task = asyncio.create_task(self._fetch_always(), name="keys of the OpenID Connect provider")

    async def close(self) -> None:
        """Stop fetching keys."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _fetch_always(self) -> None:
        failures = 0
        while True:
            self._wanted.clear()
            begun = time.monotonic()
            try:
                await self._fetch(begun)
                failures = 0
            except Exception as error:  # noqa: BLE001  No answer of the provider may end this task.
                failures += 1
                _log.warning("oidc.refresh_failed", issuer=self.file.issuer, keys_age=round(self.age), error=str(error))
            wait = min(2.0**failures, _MAX_BACKOFF) if failures else self._refresh_seconds
            try:
                async with asyncio.timeout(wait):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(max(0.0, begun + self._min_refresh_seconds - time.monotonic()))

    async def _fetch(self, begun: float) -> None:
        """Fetch the keys. If this fails, the previous keys stay in use. Raises Unavailable."""
        url = (await discover(self.file.issuer)).endpoint("jwks_uri")
        response = await request(url)
        content = json_of(url, response)
        if response.text != self._document:
            keys = await asyncio.to_thread(_keys_of, content.get("keys"), self._algorithms)
            if not keys:
                raise Unavailable(f"{url} has no key for {', '.join(self.file.algorithms)}")
            self._document, self._keys = response.text, keys
            self.epoch += 1
            self._verified.cache_clear()
            _log.info("oidc.keys_changed", issuer=self.file.issuer, keys=sorted(keys))
        self._fetch_begun, self._fetched = begun, time.monotonic()


def _keys_of(document: object, allowed: frozenset[str]) -> dict[str, Key]:
    """Return the usable keys of a JWK set by id. Others are skipped: a set may have keys for other purposes."""
    found: dict[str, Key] = {}
    for content in _objects(document):
        key_id, kind = content.get("kid"), content.get("kty")
        algorithms = allowed & _OF_KEYS.get(str(kind if kind == "RSA" else content.get("crv")), frozenset())
        if "alg" in content:
            algorithms &= {str(content["alg"])}
        # A published private key must not be trusted.
        if not algorithms or not isinstance(key_id, str) or content.get("use", "sig") != "sig" or "d" in content:
            continue
        try:
            public = jwt.PyJWK(content, min(algorithms)).key
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
            continue
        found.setdefault(key_id, Key(key_id, algorithms, public))
    return found


def _objects(document: object) -> Iterable[dict[str, Any]]:
    entries = document[:_MAX_KEYS] if isinstance(document, list) else []
    return (each for each in entries if isinstance(each, dict))
