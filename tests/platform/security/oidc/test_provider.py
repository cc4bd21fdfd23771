"""Tokens of a provider: forged, wrong, early, late; its keys during changes, and during an outage."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import importlib.util
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
import structlog.testing
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from coranto.effects import SystemClock
from coranto.errors import InvalidInput, MissingExtra, PermissionDenied, Unauthenticated, Unavailable
from coranto.labels import parse_selector
from coranto.security.admission import Authorizer
from coranto.security.oidc import http
from coranto.security.oidc import provider as provider_module
from coranto.security.oidc.grants import ProviderFile
from coranto.security.oidc.provider import Provider
from coranto.security.server import provider_of
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto_broker.settings import BrokerSettings
from tests.broker.running import eventually
from tests.servers.oidc import AUDIENCE, OidcServer, ec_key, public_jwk, rsa_key

GRANTS = (
    {"when": {"groups": "shop"}, "capabilities": ("LIST", "READ"), "selector": "name:prefix=shop/"},
    {"when": {"scope": "write"}, "capabilities": ("APPEND",), "selector": ""},
)
KEY = base64.b64encode(b"k" * 32).decode()
CAN_READ = {"groups": ["shop"]}


def file_of(server: OidcServer, **fields: Any) -> ProviderFile:
    return ProviderFile(issuer=server.issuer, audience=AUDIENCE, grants=GRANTS, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    server: OidcServer, *, refresh: float = 3600.0, least: float = 0.0, **fields: Any
) -> AsyncIterator[Provider]:
    """Run a verifier, and wait until it has fetched the keys, unless the provider fails."""
    provider = Provider(file_of(server, **fields), refresh_seconds=refresh, min_refresh_seconds=least)
    provider.start()
    try:
        await eventually(lambda: provider.epoch or server.status != 200 or server.drips)
        yield provider
    finally:
        await provider.close()


def verdict(provider: Provider, token: str) -> Claims | None:
    return provider.verify(token, time.time())


async def settled(provider: Provider, token: str) -> Claims | None:
    """Return the verdict after the keys have been fetched for the token."""
    while True:
        try:
            return verdict(provider, token)
        except Unavailable:
            await asyncio.sleep(0.01)


async def test_a_token_has_the_rights_of_its_grant(oidc: OidcServer) -> None:
    async with running(oidc) as provider:
        claims = verdict(provider, oidc.token(**CAN_READ))
        assert claims is not None
        assert claims.capability == Capability.LIST | Capability.READ
        assert claims.selector == parse_selector("name:prefix=shop/")
        assert (claims.subject, claims.identity) == ("ada", "the bearer ada")
        assert verdict(provider, oidc.token(aud=["x", AUDIENCE], scope="read write", typ=None)) is not None
        with pytest.raises(PermissionDenied, match="match no grant"):
            verdict(provider, oidc.token(groups=["others"]))
        with pytest.raises(PermissionDenied, match="match no grant"):
            verdict(provider, oidc.token())


async def test_keys_of_the_cluster_are_accepted_in_addition_to_the_provider(oidc: OidcServer) -> None:
    keys = Keys.parse(KEY)
    async with running(oidc) as provider:
        authorizer = Authorizer(keys, SystemClock(), {}, provider)
        now = time.time()
        own = sign(Claims(Capability.ALL, iat=now, exp=now + 60), keys)
        assert authorizer.claims_of(own, Capability.APPLY).covers_all
        assert authorizer.claims_of(oidc.token(**CAN_READ), Capability.READ).subject == "ada"
        with pytest.raises(PermissionDenied, match="lacks the capability APPLY"):
            authorizer.claims_of(oidc.token(**CAN_READ), Capability.APPLY)
        # A token of the cluster's keys cannot have claims of the provider, nor the other way around.
        hybrid = jwt.encode({"iss": oidc.issuer, "aud": AUDIENCE, "exp": now + 60, **CAN_READ}, b"k" * 32, "HS256")
        with pytest.raises(Unauthenticated, match="another audience"):
            authorizer.claims_of(hybrid, Capability.READ)
        with pytest.raises(PermissionDenied, match="match no grant"):
            authorizer.claims_of(oidc.token(cap=int(Capability.ALL), sel={}), Capability.READ)
        for text in ("", "x", "a.b.c", "..", "eyJhbGciOiJub25lIn0.e30.", oidc.token() + "x"):
            with pytest.raises(Unauthenticated):
                authorizer.claims_of(text, Capability.READ)


def forged(oidc: OidcServer, header: dict[str, Any], signature: bytes = b"") -> str:
    content = {"iss": oidc.issuer, "aud": AUDIENCE, "exp": int(time.time()) + 60, **CAN_READ}
    parts = (json.dumps(header).encode(), json.dumps(content).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
async def test_a_public_key_is_not_accepted_as_a_secret(oidc: OidcServer, algorithm: str) -> None:
    """A token signed by HMAC with the provider's public key (algorithm confusion)."""
    public = oidc.keys["rsa-1"].public_key()
    hashes = {"HS256": hashlib.sha256, "HS384": hashlib.sha384, "HS512": hashlib.sha512}
    async with running(oidc) as provider:
        authorizer = Authorizer(Keys.parse(KEY), SystemClock(), {}, provider)
        for secret in (
            public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
            json.dumps(public_jwk(oidc.keys["rsa-1"], "rsa-1")).encode(),
            b"",
        ):
            unsigned = forged(oidc, {"alg": algorithm, "kid": "rsa-1", "typ": "JWT"}).rpartition(".")[0]
            signature = hmac.new(secret, unsigned.encode(), hashes[algorithm]).digest()
            token = f"{unsigned}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
            assert verdict(provider, token) is None, "it is left to the keys of the cluster"
            with pytest.raises(Unauthenticated):
                authorizer.claims_of(token, Capability.READ)


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", None, 1, ["RS256"], {"a": 1}])
async def test_a_token_without_a_signature_is_refused(oidc: OidcServer, algorithm: Any) -> None:
    async with running(oidc) as provider:
        authorizer = Authorizer(Keys.parse(KEY), SystemClock(), {}, provider)
        with pytest.raises(Unauthenticated):
            authorizer.claims_of(forged(oidc, {"alg": algorithm, "kid": "rsa-1"}), Capability.READ)


async def test_keys_within_a_token_are_ignored(oidc: OidcServer) -> None:
    mine = rsa_key()
    evil = OidcServer()
    try:
        evil.keys["rsa-1"] = mine
        headers: list[dict[str, Any]] = [
            {"jwk": public_jwk(mine, "rsa-1")},
            {"jku": f"{evil.issuer}/keys"},
            {"x5u": f"{evil.issuer}/keys"},
            {"x5c": [base64.b64encode(b"certificate").decode()]},
        ]
        async with running(oidc) as provider:
            content = {"iss": oidc.issuer, "aud": AUDIENCE, "exp": time.time() + 60, **CAN_READ}
            for header in headers:
                token = jwt.encode(content, mine, "RS256", {"kid": "rsa-1", **header})
                with pytest.raises(Unauthenticated, match="not by the key that it names"):
                    verdict(provider, token)
                # They have no effect on a token that the provider has signed.
                assert verdict(provider, oidc.token(headers=header, **CAN_READ))
        assert not evil.requests
    finally:
        evil.stop()


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"iss": "https://other.example"}, "not by the issuer"),
        ({"iss": None}, "not by the issuer"),
        ({"iss": ["{issuer}"]}, "not by the issuer"),
        ({"aud": "other"}, "not for the audience 'coranto'"),
        ({"aud": None}, "not for the audience"),
        ({"aud": []}, "not for the audience"),
        ({"aud": ["other", "corant"]}, "not for the audience"),
        ({"aud": "coranto other"}, "not for the audience"),
        ({"aud": {"coranto": 1}}, "not for the audience"),
        ({"exp": 1}, "has expired"),
        ({"exp": None}, "lacks the claim `exp`"),
        ({"exp": "2999-01-01"}, "`exp` is not a time"),
        ({"exp": True}, "`exp` is not a time"),
        ({"nbf": 4e9}, "not valid yet"),
        ({"iat": 4e9}, "not valid yet"),
        ({"nbf": "soon"}, "`nbf` is not a time"),
        ({"sub": ["ada"]}, "`sub`"),
        ({"sub": "a" * 1000}, "`sub`"),
        ({"sub": "a\nb"}, "`sub`"),
    ],
)
async def test_wrong_claims_are_refused(oidc: OidcServer, claims: dict[str, Any], problem: str) -> None:
    given = {name: [oidc.issuer] if value == ["{issuer}"] else value for name, value in claims.items()}
    payload = {"iss": oidc.issuer, "aud": AUDIENCE, "sub": "ada", "exp": int(time.time()) + 60, **CAN_READ} | given
    content = json.dumps({name: value for name, value in payload.items() if value is not None}).encode()
    token = jwt.PyJWS().encode(content, oidc.keys["rsa-1"], "RS256", {"kid": "rsa-1"})
    async with running(oidc) as provider:
        with pytest.raises(Unauthenticated, match=problem) as refused:
            verdict(provider, token)
        assert token not in str(refused.value)


async def test_clocks_may_differ_by_five_seconds(oidc: OidcServer) -> None:
    async with running(oidc) as provider:
        now = time.time()
        token = oidc.token(iat=int(now), nbf=int(now), exp=int(now) + 60, **CAN_READ)
        for difference in (-4, 0, 64):
            assert provider.verify(token, int(now) + difference)
        for difference in (-6, 65):
            with pytest.raises(Unauthenticated):
                provider.verify(token, int(now) + difference)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"typ": "logout+jwt"}, "grants no access"),
        ({"typ": "dpop+jwt"}, "grants no access"),
        ({"typ": 1}, "grants no access"),
        ({"kid": ""}, "does not name its key"),
        ({"kid": "k" * 1000}, "does not name its key"),
    ],
)
async def test_wrong_headers_are_refused(oidc: OidcServer, header: dict[str, Any], problem: str) -> None:
    async with running(oidc) as provider:
        assert verdict(provider, oidc.token(headers={"typ": "at+jwt"}, **CAN_READ))
        with pytest.raises(Unauthenticated, match=problem):
            verdict(provider, oidc.token(headers=header, **CAN_READ))


@pytest.mark.parametrize("header", [{"crit": ["exp"], "exp": 1}, {"kid": 1}, {"b64": False, "crit": ["b64"]}])
async def test_unknown_critical_headers_are_refused(oidc: OidcServer, header: dict[str, Any]) -> None:
    async with running(oidc) as provider:
        authorizer = Authorizer(Keys.parse(KEY), SystemClock(), {}, provider)
        with pytest.raises(Unauthenticated):
            authorizer.claims_of(forged(oidc, {"alg": "RS256", "kid": "rsa-1", **header}, b"s"), Capability.READ)


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_kinds_of_keys_match_their_algorithms(oidc: OidcServer) -> None:
    oidc.keys = {
        "rsa": rsa_key(),
        "p256": ec_key(),
        "p384": ec.generate_private_key(ec.SECP384R1()),
        "ed": ed25519.Ed25519PrivateKey.generate(),
        "weak": rsa.generate_private_key(65537, 1024),
    }
    async with running(oidc) as provider:
        for key_id, algorithm in (("rsa", "RS256"), ("rsa", "PS256"), ("p256", "ES256"), ("ed", "EdDSA")):
            assert verdict(provider, oidc.token(key_id, algorithm, **CAN_READ))
        for key_id, algorithm in (("rsa", "RS512"), ("p384", "ES384")):
            with pytest.raises(Unauthenticated, match=f"signed with {algorithm}, and this cluster accepts RS256"):
                verdict(provider, oidc.token(key_id, algorithm, **CAN_READ))
        with pytest.raises(Unauthenticated, match="its key can verify"):
            verdict(provider, oidc.token("weak", **CAN_READ))
        with pytest.raises(Unauthenticated, match="key is not for ES256"):
            verdict(provider, oidc.token("p256", "ES256", {"kid": "rsa"}, **CAN_READ))
    async with running(oidc, algorithms=("ES384",)) as provider:
        assert verdict(provider, oidc.token("p384", "ES384", **CAN_READ))
        with pytest.raises(Unauthenticated, match="this cluster accepts ES384"):
            verdict(provider, oidc.token("rsa", **CAN_READ))


async def test_a_key_is_used_only_as_its_provider_declares(oidc: OidcServer) -> None:
    key, other, private = oidc.keys["rsa-1"], rsa_key(), rsa_key()
    secret = base64.urlsafe_b64encode(b"k" * 64).decode()
    oidc.jwks = json.dumps(
        {
            "keys": [
                1,
                {},
                {"kty": "oct", "kid": "oct", "k": secret, "alg": "HS256"},
                {"kty": "oct", "kid": "oct-rs", "k": secret, "alg": "RS256"},
                {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
                {"kty": "RSA", "kid": "number", "n": 5, "e": {}},
                {"kty": "RSA", "kid": "zero", "n": "AA", "e": "AA"},
                {"kty": "RSA", "kid": "huge", "n": "_" * 50_000, "e": "AQAB"},
                {"kty": ["RSA"], "crv": ["P-256"], "kid": "lists"},
                {"kty": "EC", "crv": "P-256", "kid": "nowhere", "x": "AA", "y": "AA"},
                {"kty": "RSA", "kid": 5, "n": "AA", "e": "AA"},
                {"kty": "RSA", "kid": "alg", "alg": {"a": []}, "n": "AA", "e": "AA"},
                json.loads('{"a":' * 900 + "1" + "}" * 900),
                public_jwk(key, "rsa-1", alg="PS256"),
                public_jwk(other, "enc", use="enc"),
                public_jwk(other, "rsa-1"),
                jwt.algorithms.RSAAlgorithm.to_jwk(private, as_dict=True) | {"kid": "private"},
            ]
        }
    ).encode()
    oidc.keys |= {"enc": other, "private": private}
    async with running(oidc) as provider:
        assert verdict(provider, oidc.token(algorithm="PS256", **CAN_READ))
        with pytest.raises(Unauthenticated, match="key is not for RS256"):
            verdict(provider, oidc.token(**CAN_READ))
        for key_id in ("enc", "private"):
            with pytest.raises(Unauthenticated, match="not one of"):
                await settled(provider, oidc.token(key_id, **CAN_READ))


async def test_a_new_key_is_fetched_on_first_use_and_a_removed_key_is_dropped(oidc: OidcServer) -> None:
    async with running(oidc) as provider:
        old = oidc.token(**CAN_READ)
        assert verdict(provider, old)
        oidc.keys["rsa-2"] = rsa_key()
        new = oidc.token("rsa-2", **CAN_READ)
        with pytest.raises(Unavailable, match="are being fetched; try again"):
            verdict(provider, new)
        assert await settled(provider, new)
        assert verdict(provider, old)
        epoch = provider.epoch
        del oidc.keys["rsa-1"]
        oidc.keys["rsa-3"] = rsa_key()
        assert await settled(provider, oidc.token("rsa-3", **CAN_READ))
        assert provider.epoch > epoch
        with pytest.raises(Unauthenticated, match="key is not one of"):
            await settled(provider, old)


async def test_another_key_under_the_same_id_replaces_it(oidc: OidcServer) -> None:
    async with running(oidc, refresh=0.01) as provider:
        old = oidc.token(**CAN_READ)
        assert verdict(provider, old)
        oidc.keys["rsa-1"] = rsa_key()
        new = oidc.token(**CAN_READ)

        def accepted(token: str) -> bool:
            try:
                return verdict(provider, token) is not None
            except Unauthenticated:
                return False

        await eventually(lambda: accepted(new))
        assert not accepted(old)


async def test_a_flood_of_unknown_keys_causes_few_fetches(oidc: OidcServer) -> None:
    mine = rsa_key()
    content = {"iss": oidc.issuer, "aud": AUDIENCE, "exp": time.time() + 60, **CAN_READ}
    async with running(oidc, least=30.0) as provider:
        token = jwt.encode(content, mine, "RS256", {"kid": "kid-0"})
        for number in range(3000):
            header = base64.urlsafe_b64encode(json.dumps({"alg": "RS256", "kid": f"kid-{number}"}).encode())
            with pytest.raises((Unavailable, Unauthenticated)):
                verdict(provider, f"{header.rstrip(b'=').decode()}.{token.partition('.')[2]}")
            if number % 100 == 0:
                await asyncio.sleep(0)
        assert oidc.requests == {"openid-configuration": 1, "keys": 1}
        assert len(provider._unknown) <= 1024
        assert verdict(provider, oidc.token(**CAN_READ))


async def test_calls_do_not_wait_for_a_slow_provider(oidc: OidcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_SECONDS", 0.2)
    oidc.drips = True
    with structlog.testing.capture_logs() as logs:
        async with running(oidc) as provider:
            with pytest.raises(Unavailable, match="cannot be fetched at the moment"):
                verdict(provider, oidc.token(**CAN_READ))
            await eventually(lambda: logs)
            oidc.drips = False
            assert await settled(provider, oidc.token(**CAN_READ))
    assert logs[0]["event"] == "oidc.refresh_failed"
    assert "did not answer within 0.2 seconds" in logs[0]["error"]


def _huge(oidc: OidcServer) -> None:
    oidc.jwks = b'{"keys": [' + b" " * (10 << 20) + b"]}"


def _empty(oidc: OidcServer) -> None:
    oidc.jwks = b'{"keys": []}'


def _symmetric(oidc: OidcServer) -> None:
    oidc.jwks = json.dumps({"keys": [{"kty": "oct", "kid": "rsa-1", "k": "a2V5", "alg": "HS256"}]}).encode()


def _failing(oidc: OidcServer) -> None:
    oidc.status = 503


def _unavailable(oidc: OidcServer) -> None:
    oidc.stop()


def _other_issuer(oidc: OidcServer) -> None:
    oidc.discovery = {"issuer": "https://other.example"}


@pytest.mark.parametrize("fault", [_huge, _empty, _symmetric, _failing, _unavailable, _other_issuer])
async def test_fetched_keys_stay_in_use_while_the_provider_fails(
    oidc: OidcServer, fault: Callable[[OidcServer], None]
) -> None:
    async with running(oidc, refresh=0.01, offline_seconds=60) as provider:
        assert verdict(provider, oidc.token(**CAN_READ))
        with structlog.testing.capture_logs() as logs:
            fault(oidc)
            await eventually(lambda: any(entry["event"] == "oidc.refresh_failed" for entry in logs))
        assert verdict(provider, oidc.token(**CAN_READ))
        unknown_token = jwt.encode({"exp": time.time() + 60}, rsa_key(), "RS256", {"kid": "new"})
        with pytest.raises(Unavailable):
            verdict(provider, unknown_token)
        assert provider.age < 60


async def test_keys_expire_after_the_allowed_time_without_the_provider(oidc: OidcServer) -> None:
    async with running(oidc, refresh=0.01, offline_seconds=0.5) as provider:
        token = oidc.token(**CAN_READ)
        assert verdict(provider, token)
        oidc.stop()
        await eventually(lambda: provider.age > 0.5)
        with pytest.raises(Unavailable, match="cannot be fetched at the moment"):
            verdict(provider, token)
        oidc.start()
        assert await settled(provider, token)


async def test_an_unexpected_error_does_not_end_the_fetching(oidc: OidcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, provider_module.Key]:
        raise RuntimeError("not an error of the provider")

    async with running(oidc, refresh=0.01, offline_seconds=60) as provider:
        with structlog.testing.capture_logs() as logs, monkeypatch.context() as patched:
            patched.setattr(provider_module, "_keys_of", fail)
            oidc.keys["rsa-2"] = rsa_key()
            await eventually(lambda: any(entry["event"] == "oidc.refresh_failed" for entry in logs))
            assert verdict(provider, oidc.token(**CAN_READ))
        assert await settled(provider, oidc.token("rsa-2", **CAN_READ))


async def test_keys_are_fetched_after_a_provider_was_unavailable_at_the_start(oidc: OidcServer) -> None:
    oidc.stop()
    provider = Provider(file_of(oidc), min_refresh_seconds=0.0)
    provider.start()
    try:
        with pytest.raises(Unavailable):
            verdict(provider, oidc.token(**CAN_READ))
        oidc.start()
        assert await settled(provider, oidc.token(**CAN_READ))
    finally:
        await provider.close()


async def test_the_number_of_keys_is_bounded(oidc: OidcServer) -> None:
    one = public_jwk(oidc.keys["rsa-1"], "rsa-1")
    oidc.jwks = json.dumps({"keys": [one, *({**one, "kid": f"k{number}"} for number in range(400))]}).encode()
    async with running(oidc) as provider:
        assert len(provider._keys) == 100
        assert verdict(provider, oidc.token(**CAN_READ))


def test_a_setting_without_keys_or_the_extra_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BrokerSettings(oidc=tmp_path / "provider.toml")
    with pytest.raises(InvalidInput, match="set auth_keys too"):
        provider_of(settings, CollectorRegistry())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cryptography" else find(name))
    keyed = settings.model_copy(update={"auth_keys": SecretStr(KEY)})
    with pytest.raises(MissingExtra, match=r"pip install 'coranto\[oidc\]'"):
        provider_of(keyed, CollectorRegistry())
