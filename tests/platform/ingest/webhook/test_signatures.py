"""Signatures of each sender, by the sender's own examples if it publishes one."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from multidict import CIMultiDict

from coranto.errors import InvalidInput
from coranto.ingest.webhook.signatures import SCHEMES, TOLERANCE, verify

BODY = b'{"id": 1}'


def mac(content: bytes, secret: bytes = b"new") -> bytes:
    return hmac.new(secret, content, hashlib.sha256).digest()


def check(scheme: str, headers: dict[str, str], body: bytes = BODY, now: float = 1000.0) -> None:
    verify(SCHEMES[scheme], CIMultiDict(headers), body, [b"old", b"new"], now)


def test_the_example_of_github() -> None:
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    secret = b"It's a Secret to Everybody"
    headers = CIMultiDict({"X-Hub-Signature-256": signature})
    verify(SCHEMES["github"], headers, b"Hello, World!", [secret], 0.0)


def test_the_example_of_slack() -> None:
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&"
        b"channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&"
        b"response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F"
        b"96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = {
        "X-Slack-Signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
        "X-Slack-Request-Timestamp": "1531420618",
    }
    verify(SCHEMES["slack"], CIMultiDict(headers), body, [b"8f742231b10e8888abcd99yyyzzz85a5"], 1531420618 + TOLERANCE)


def test_each_secret_is_valid_in_each_form() -> None:
    for secret in (b"old", b"new"):
        digest = mac(BODY, secret)
        for text in (digest.hex(), f"sha256={digest.hex().upper()}", base64.b64encode(digest).decode()):
            check("hmac", {"x-signature-256": text})
        check("shopify", {"X-Shopify-Hmac-Sha256": base64.b64encode(digest).decode()})
    stamped = mac(b"990." + BODY).hex()
    check("stripe", {"Stripe-Signature": f"t=990, v1=00,v1={stamped}"})


@pytest.mark.parametrize(
    ("scheme", "headers", "error"),
    [
        ("hmac", {}, "has no header X-Signature-256"),
        ("hmac", {"X-Signature-256": "sha256="}, "does not match the body"),
        ("github", {"X-Hub-Signature-256": mac(BODY).hex()}, "does not match the body"),
        ("github", {"X-Hub-Signature-256": "sha1=" + mac(BODY).hex()}, "does not match the body"),
        ("shopify", {"X-Shopify-Hmac-Sha256": mac(BODY).hex()}, "does not match the body"),
        ("shopify", {"X-Shopify-Hmac-Sha256": "\udce9"}, "does not match the body"),
        ("stripe", {"Stripe-Signature": "v1=" + mac(b"990." + BODY).hex()}, "has no time"),
        ("stripe", {"Stripe-Signature": "t=990,v1=" + mac(b"991." + BODY).hex()}, "does not match the body"),
        ("stripe", {"Stripe-Signature": "t=990,v0=" + mac(b"990." + BODY).hex()}, "does not match the body"),
        ("stripe", {"Stripe-Signature": "t=699,v1=" + mac(b"699." + BODY).hex()}, "more than 300 s"),
        ("stripe", {"Stripe-Signature": "t=1301,v1=" + mac(b"1301." + BODY).hex()}, "more than 300 s"),
        ("slack", {"X-Slack-Signature": "v0=" + mac(b"v0:990:" + BODY).hex()}, "has no time"),
        ("slack", {"X-Slack-Signature": "v0=00", "X-Slack-Request-Timestamp": "-1"}, "has no time"),
    ],
)
def test_wrong_signatures_are_refused(scheme: str, headers: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidInput, match=error) as refused:
        check(scheme, headers)
    assert "new" not in str(refused.value)
