"""Tokens: signing, verification, and refusals."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.client import ClientConfig, ClientTls
from coranto.errors import InvalidInput, PermissionDenied, RpcFailed, Unauthenticated
from coranto.security.tokens import (
    BearerToken,
    Capability,
    Claims,
    Keys,
    bearer_of,
    claims_for,
    require,
    scope_of,
    shows,
    sign,
    verify,
)
from coranto.wire import protocol_pb2 as pb

NOW = 1_700_000_000.0
OLD, NEW, FOREIGN = (base64.b64encode(bytes([number]) * 48).decode() for number in (1, 2, 3))
KEYS = Keys.parse(OLD)
READ = labels.parse_selector("name:prefix = flights/, team in (a, b), !secret")


def encoded(part: object) -> str:
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def token(content: object = None, *, header: object = None, key: str = OLD, digest: str = "sha256") -> str:
    """Return a handmade token."""
    content = {"cap": 8, "sel": {}, "iat": NOW, "exp": NOW + 60} if content is None else content
    signed = f"{encoded({'alg': 'HS256', 'typ': 'JWT'} if header is None else header)}.{encoded(content)}"
    mac = hmac.new(base64.b64decode(key), signed.encode(), getattr(hashlib, digest)).digest()
    return f"{signed}.{encoded(mac)}"


def with_claims(**changes: Any) -> str:
    content = {"cap": 8, "sel": {}, "iat": NOW, "exp": NOW + 60} | changes
    return token({name: value for name, value in content.items() if value is not ...})


def test_claims_round_trip_through_a_token() -> None:
    claims = Claims(Capability.READ | Capability.LIST, READ, NOW, NOW + 60, "someone")
    assert verify(sign(claims, KEYS), KEYS, NOW) == claims


def test_a_token_has_the_wire_form() -> None:
    claims = Claims(Capability.READ, labels.parse_selector("name:prefix=a/, team != 1"), NOW + 0.7, NOW + 60.9)
    header, content, _ = sign(claims, KEYS).split(".")
    assert json.loads(base64.urlsafe_b64decode(header + "==")) == {"alg": "HS256", "typ": "JWT"}
    assert json.loads(base64.urlsafe_b64decode(content + "==")) == {
        "cap": 8,
        "sel": {
            "include": {"labels": [{"name": "name", "value": "a/", "prefix": True}]},
            "exclude": {"labels": [{"name": "team", "value": "1"}]},
        },
        "iat": int(NOW),
        "exp": int(NOW) + 60,
    }


def test_a_token_written_by_go_is_accepted() -> None:
    selector = {"include": {"labels": [{"name": "name", "value": "a/b"}]}, "exclude": {"labels": None}}
    claims = verify(with_claims(sel=selector, iss="control", sub="someone"), KEYS, NOW)
    assert claims == Claims(Capability.READ, labels.parse_selector("name=a/b"), NOW, NOW + 60, "someone")


def test_the_legacy_meta_label_prefix_is_accepted() -> None:
    claims = verify(with_claims(sel={"exclude": {"labels": [{"name": "prefix", "value": "a/"}]}}), KEYS, NOW)
    assert not claims.covers("a/b")
    assert claims.covers("b/a")


def test_hs384_is_accepted() -> None:
    assert verify(token(header={"alg": "HS384"}, digest="sha384"), KEYS, NOW).capability == Capability.READ


def test_application_bits_are_kept() -> None:
    assert verify(with_claims(cap=8 | 1 << 20), KEYS, NOW).capability == 8 | 1 << 20
    assert verify(with_claims(cap=0xFFFFFFFF), KEYS, NOW).capability == Capability.ALL


@pytest.mark.parametrize(
    ("now", "accepted"),
    [(NOW - 5, True), (NOW - 5.1, False), (NOW + 60, True), (NOW + 64.9, True), (NOW + 65, False), (NOW + 1e6, False)],
)
def test_times_have_a_leeway(now: float, accepted: bool) -> None:
    if accepted:
        verify(token(), KEYS, now)
    else:
        with pytest.raises(Unauthenticated):
            verify(token(), KEYS, now)


def plain(claims: Claims) -> tuple[int, str, float, float]:
    """Return claims in a form for comparison."""
    return claims.capability, labels.format_selector(claims.selector), claims.iat, claims.exp


def tampered(change: Callable[[list[str]], list[str]]) -> str:
    return ".".join(change(token().split(".")))


REFUSED: dict[str, str] = {
    "empty": "",
    "words": "not a token",
    "not ASCII": "é.é.é",
    "one part": encoded({}),
    "two parts": tampered(lambda parts: parts[:2]),
    "four parts": tampered(lambda parts: [*parts, parts[2]]),
    "bad base64": tampered(lambda parts: [parts[0], "!!!!", parts[2]]),
    "header is not JSON": token(header=b"{"),
    "header is a list": token(header=[]),
    "header without alg": token(header={"typ": "JWT"}),
    "alg none": token(header={"alg": "none"}),
    "alg none, unsigned": tampered(lambda parts: [encoded({"alg": "none"}), parts[1], ""]),
    "alg None in capitals": token(header={"alg": "NONE"}),
    "alg HS512": token(header={"alg": "HS512"}, digest="sha512"),
    "alg RS256": token(header={"alg": "RS256"}),
    "alg is another than it was signed with": token(header={"alg": "HS384"}),
    "alg in lower case": token(header={"alg": "hs256"}),
    "alg is a number": token(header={"alg": 256}),
    "unknown critical header": token(header={"alg": "HS256", "crit": ["b64x"], "b64x": True}),
    "detached content": token(header={"alg": "HS256", "crit": ["b64"], "b64": False}),
    "unsigned": tampered(lambda parts: [*parts[:2], ""]),
    "signature cut short": tampered(lambda parts: [*parts[:2], parts[2][:-4]]),
    "signature of other content": tampered(lambda parts: [parts[0], encoded({"cap": 255}), parts[2]]),
    "foreign key": token(key=FOREIGN),
    "content is not JSON": token(b"{"),
    "content is not UTF-8": token(b'{"cap": "\xff"}'),
    "content is deeply nested": token(b"[" * 100_000),
    "content is a list": token([]),
    "exp is missing": with_claims(exp=...),
    "exp is null": with_claims(exp=None),
    "exp is text": with_claims(exp="1800000000"),
    "exp is true": with_claims(exp=True),
    "exp is NaN": token(b'{"cap": 8, "sel": {}, "exp": NaN}'),
    "exp is infinite": token(b'{"cap": 8, "sel": {}, "exp": Infinity}'),
    "exp overflows": token(b'{"cap": 8, "sel": {}, "exp": 1e999}'),
    "exp is huge": with_claims(exp=10**400),
    "exp is negative": with_claims(exp=-1),
    "exp has passed": with_claims(exp=NOW - 5),
    "iat is to come": with_claims(iat=NOW + 6),
    "iat is text": with_claims(iat="now"),
    "nbf is to come": with_claims(nbf=NOW + 6),
    "for another audience": with_claims(aud="somebody"),
    "cap is missing": with_claims(cap=...),
    "cap is negative": with_claims(cap=-1),
    "cap is too wide": with_claims(cap=1 << 32),
    "cap is a fraction": with_claims(cap=8.0),
    "cap is true": with_claims(cap=True),
    "cap is text": with_claims(cap="READ"),
    "sub is a number": with_claims(sub=7),
    "sub has lines": with_claims(sub="a\nb"),
    "sub is too long": with_claims(sub="x" * 257),
    "sel is missing": with_claims(sel=...),
    "sel is null": with_claims(sel=None),
    "sel is text": with_claims(sel="name=a"),
    "sel has an unknown side": with_claims(sel={"only": {"labels": []}}),
    "sel's side is a list": with_claims(sel={"include": []}),
    "sel's side is unknown inside": with_claims(sel={"include": {"label": []}}),
    "sel's labels are a mapping": with_claims(sel={"include": {"labels": {}}}),
    "sel's label is text": with_claims(sel={"include": {"labels": ["name"]}}),
    "sel's label has no name": with_claims(sel={"include": {"labels": [{"value": "a"}]}}),
    "sel's label has an unknown field": with_claims(sel={"include": {"labels": [{"name": "a", "regex": ".*"}]}}),
    "sel's value is a number": with_claims(sel={"include": {"labels": [{"name": "a", "value": 1}]}}),
    "sel's prefix is text": with_claims(sel={"include": {"labels": [{"name": "a", "prefix": "yes"}]}}),
    "sel's name is half a character": with_claims(sel={"include": {"labels": [{"name": "\ud800"}]}}),
    "sel's old prefix is no folder": with_claims(sel={"include": {"labels": [{"name": "prefix", "value": "a"}]}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_tokens_are_refused(case: str) -> None:
    refused = REFUSED[case]
    with pytest.raises(Unauthenticated) as caught:
        verify(refused, KEYS, NOW)
    assert caught.value.code == "UNAUTHENTICATED"
    assert isinstance(caught.value, RpcFailed)
    assert OLD not in str(caught.value)
    for part in refused.split("."):
        assert len(part) < 8 or part not in str(caught.value)


def test_a_valid_handmade_token_is_accepted() -> None:
    """So the table's tokens are refused for their faults, and not for how they are made."""
    assert plain(verify(token(), KEYS, NOW)) == (Capability.READ, "", NOW, NOW + 60)


@given(st.data())
def test_no_changed_token_is_accepted(data: st.DataObject) -> None:
    good = token()
    position = data.draw(st.integers(0, len(good) - 1))
    character = data.draw(st.characters(codec="ascii").filter(lambda c: c != good[position]))
    with pytest.raises(Unauthenticated):
        verify(good[:position] + character + good[position + 1 :], KEYS, NOW)


def test_keys_rotate_without_an_interruption() -> None:
    claims = Claims(Capability.READ, pb.LabelSelector(), NOW, NOW + 60)
    before, introduced, switched, after = (Keys.parse(text) for text in (OLD, f"{OLD},{NEW}", f" {NEW}\n{OLD} ", NEW))
    for signer, verifier in [
        (before, introduced),
        (introduced, before),
        (introduced, switched),
        (switched, introduced),
        (switched, after),
        (after, switched),
    ]:
        assert plain(verify(sign(claims, signer), verifier, NOW)) == plain(claims)
    for signer, verifier in [(before, after), (after, before), (introduced, after), (switched, before)]:
        with pytest.raises(Unauthenticated, match="not by a key that is known"):
            verify(sign(claims, signer), verifier, NOW)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no key"),
        (" , ", "no key"),
        ("AA==", "no key"),
        (f"{OLD},?", "key 2 .* not base64"),
        (OLD[:-1] + "é", "key 1 .* not base64"),
        (base64.b64encode(b"x" * 31).decode(), "key 1 .* has 31 bytes"),
    ],
)
def test_invalid_keys_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        Keys.parse(text)
    assert OLD not in str(caught.value)


def test_keys_may_allow_requests_without_a_token() -> None:
    assert not Keys.parse(OLD).accept_missing
    keys = Keys.parse(f"AA==,{OLD}")
    assert keys.accept_missing
    assert keys.secrets == KEYS.secrets


def test_a_token_must_expire() -> None:
    with pytest.raises(InvalidInput, match="must expire"):
        sign(Claims(Capability.READ), KEYS)


def test_capabilities_are_required_in_full() -> None:
    claims = Claims(Capability.READ | Capability.LIST)
    require(claims, Capability.READ)
    require(claims, Capability.READ | Capability.LIST)
    require(Claims(Capability.ALL), Capability.REPLICATE)
    with pytest.raises(PermissionDenied, match="lacks the capability APPEND"):
        require(claims, Capability.READ | Capability.APPEND)
    with pytest.raises(PermissionDenied):
        require(Claims(Capability(0)), Capability.LIST)


def test_a_scope_covers_the_selected_journals() -> None:
    claims = Claims(Capability.READ, READ)
    assert claims.covers("flights/1", labels.label_set(team="a"))
    assert not claims.covers("flights/1", labels.label_set(team="c"))
    assert not claims.covers("flights/1", labels.label_set(team="a", secret="yes"))
    assert not claims.covers("weather/1", labels.label_set(team="a"))
    assert not claims.covers("flights/1")
    assert Claims(Capability.READ).covers("anything")
    # A stored label is not taken for the journal's name.
    forged = pb.LabelSet(labels=[pb.Label(name="name", value="a/b")])
    assert not Claims(Capability.READ, labels.parse_selector("name=a/b")).covers("b/c", forged)


def test_a_scope_may_be_decided_by_the_name_alone() -> None:
    assert Claims(Capability.APPLY).by_name_alone
    assert Claims(Capability.APPLY, labels.parse_selector("name:prefix=a/, name!=a/b")).by_name_alone
    assert not Claims(Capability.APPLY, labels.parse_selector("name:prefix=a/, team=a")).by_name_alone
    assert not Claims(Capability.APPLY, labels.parse_selector("!secret")).by_name_alone


def test_a_missing_journal_may_be_out_of_scope() -> None:
    def limited(scope: str) -> BearerToken:
        return BearerToken.parse(sign(Claims(Capability.READ, labels.parse_selector(scope), NOW, NOW + 60), KEYS))

    assert shows(None, "a/b")
    assert shows(KEYS, "a/b")
    assert shows(limited("name:prefix=a/"), "a/b")
    assert not shows(limited("name:prefix=a/"), "b/c")
    assert not shows(limited("name:prefix=a/, team=a"), "a/b"), "the labels of a missing journal are unknown"
    for text in ("abc", "a.b.c", "a.e30.c"):
        assert not shows(BearerToken.parse(text), "a/b")


def test_claims_for_a_call_allow_only_that_call() -> None:
    claims = claims_for(Capability.READ, scope_of(["b/c;part", "a/b", "a/b"]), NOW, 60)
    assert plain(claims) == (Capability.READ, "name in (a/b,b/c)", NOW, NOW + 60)


def test_a_scope_too_large_to_send_is_omitted() -> None:
    assert claims_for(Capability.APPLY, scope_of(f"journal/{n:0100}" for n in range(30)), NOW, 60).covers_all


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "abc"])
def test_headers_without_a_token_are_refused(header: str) -> None:
    with pytest.raises(Unauthenticated, match="Bearer"):
        bearer_of([header])


def test_the_token_is_read_from_the_header() -> None:
    assert bearer_of([]) is None
    assert bearer_of(["Bearer abc"]) == bearer_of([b"bearer  abc "]) == "abc"
    with pytest.raises(Unauthenticated, match="more than one"):
        bearer_of(["Bearer a", "Bearer b"])


@pytest.mark.parametrize("text", ["", " ", "a b", "a\nb", "é"])
def test_invalid_bearer_tokens_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="auth token"):
        BearerToken.parse(text)


@pytest.mark.parametrize("auth", [Keys.parse(f"{OLD},{NEW}"), BearerToken.parse(token())])
def test_secrets_are_hidden_in_texts_but_pickled(auth: Keys | BearerToken) -> None:
    config = ClientConfig("127.0.0.1:1", auth=auth)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    claims = Claims(Capability.READ, pb.LabelSelector(), NOW, NOW + 60)
    assert again.auth.bearer(claims) == auth.bearer(claims)
    shown = f"{config!r} {config} {dataclasses.asdict(config)} {auth!r} {auth}"
    secrets = [secret.reveal() for secret in (auth.secrets if isinstance(auth, Keys) else [auth.token])]
    for secret in secrets:
        for form in (repr(secret)[2:-1], base64.b64encode(secret).decode(), secret.hex()):
            assert form not in shown
    assert config != ClientConfig("127.0.0.1:1", auth=Keys.parse(FOREIGN))


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:1",
        "127.8.9.10:1",
        "localhost:1",
        "[::1]:1",
        "http://LOCALHOST",
        "127.0.0.1:1,127.0.0.2:1",
        "unix:///run/broker.sock",
        "https://broker.example:1",
    ],
)
def test_tokens_may_be_sent_over_loopback_sockets_and_tls(endpoint: str) -> None:
    assert ClientConfig(endpoint, auth=KEYS).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "broker.example:1",
        "http://10.0.0.1:1",
        "0.0.0.0:1",
        "[::]:1",
        "[fe80::1]:1",
        "localhost.example:1",
        "127.0.0.1.example:1",
        "127.0.0.1:1,10.0.0.1:1",
    ],
)
def test_tokens_must_not_be_sent_in_the_clear(endpoint: str) -> None:
    with pytest.raises(InvalidInput, match="in the clear"):
        ClientConfig(endpoint, auth=KEYS)
    assert ClientConfig(endpoint).auth is None


def test_configurations_are_read_from_the_environment() -> None:
    assert ClientConfig.from_environment("broker:1", environment={}) == ClientConfig("broker:1")
    keys = {"CORANTO_AUTH_KEYS": OLD, "CORANTO_AUTH_TOKEN": ""}
    assert ClientConfig.from_environment("127.0.0.1:1", environment=keys).auth == KEYS
    bearer = {"CORANTO_AUTH_TOKEN": "a.b.c"}
    assert ClientConfig.from_environment("127.0.0.1:1", environment=bearer).auth == BearerToken.parse("a.b.c")
    with pytest.raises(InvalidInput, match="in the clear"):
        ClientConfig.from_environment("broker:1", environment=keys)
    with pytest.raises(InvalidInput, match="only one of"):
        ClientConfig.from_environment("127.0.0.1:1", environment=keys | bearer)
    files = {"CORANTO_TLS_CA": "/ca", "CORANTO_TLS_CERT": "/cert", "CORANTO_TLS_KEY": "/key"}
    tls = ClientConfig.from_environment("https://broker", environment=files).tls
    assert tls is not None
    assert (str(tls.ca), str(tls.cert), str(tls.key)) == ("/ca", "/cert", "/key")
    # The same environment may be used for a local cluster without TLS.
    assert ClientConfig.from_environment("127.0.0.1:1", environment=files).tls is None


def test_certificates_need_their_key_and_tls() -> None:
    with pytest.raises(InvalidInput, match="together"):
        ClientConfig.from_environment("https://broker", environment={"CORANTO_TLS_CERT": "/cert"})
    with pytest.raises(InvalidInput, match="without TLS"):
        ClientConfig("broker:1", tls=ClientTls())
