"""Signatures of webhooks: HMAC-SHA256 of the body, in the format of each sender. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput

TOLERANCE: Final = 300.0
"""The maximum seconds between a signed time and the gateway's clock."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of a sender's signatures, and the header or field with its delivery id.

    A scheme with `signed` also signs a time: `signed` is the text before the body, with the time in place of `{}`.
    """

    header: str
    prefix: str = ""
    is_loose: bool = False
    """True if the prefix may be missing, and the signature may be in base64."""
    is_base64: bool = False
    signed: str = ""
    time_header: str = ""
    """The header with the time; empty if the signature's header has the time, like Stripe's `t=…,v1=…`."""
    delivery_header: str = ""
    delivery_field: str = ""


SCHEMES: Final[Mapping[str, Scheme]] = {
    "hmac": Scheme("X-Signature-256", prefix="sha256=", is_loose=True),
    "github": Scheme("X-Hub-Signature-256", prefix="sha256=", delivery_header="X-GitHub-Delivery"),
    "stripe": Scheme("Stripe-Signature", prefix="v1=", signed="{}.", delivery_field="id"),
    "slack": Scheme(
        "X-Slack-Signature",
        prefix="v0=",
        signed="v0:{}:",
        time_header="X-Slack-Request-Timestamp",
        delivery_field="event_id",
    ),
    "shopify": Scheme("X-Shopify-Hmac-Sha256", is_base64=True, delivery_header="X-Shopify-Webhook-Id"),
}


def verify(scheme: Scheme, headers: Mapping[str, str], body: bytes, secrets: Iterable[bytes], now: float) -> None:
    """Verify that one of the secrets has signed a body, in constant time. Raises InvalidInput."""
    given = headers.get(scheme.header, "")
    if not given:
        raise InvalidInput(f"the request has no header {scheme.header}")
    parts = [each.strip() for each in given.split(",")]
    time = ""
    if scheme.signed:
        named = dict(each.partition("=")[::2] for each in parts)
        time = headers.get(scheme.time_header, "") if scheme.time_header else named.get("t", "")
        if not (time.isascii() and time.isdecimal() and len(time) < 16):
            raise InvalidInput(f"the signature in {scheme.header} has no time")
        if abs(now - int(time)) > TOLERANCE:
            raise InvalidInput(
                f"the request was signed at {time}, more than {TOLERANCE:.0f} s from the time of the gateway"
            )
    signatures = [
        each.removeprefix(scheme.prefix) for each in parts if scheme.is_loose or each.startswith(scheme.prefix)
    ]
    content = scheme.signed.format(time).encode() + body
    matches = False
    for secret in secrets:
        digest = hmac.new(secret, content, hashlib.sha256).digest()
        for each in signatures:
            if scheme.is_base64 or scheme.is_loose:
                matches |= hmac.compare_digest(base64.b64encode(digest), _encoded(each))
            if not scheme.is_base64:
                matches |= hmac.compare_digest(digest.hex().encode(), _encoded(each.lower()))
    if not matches:
        raise InvalidInput(f"the signature in {scheme.header} does not match the body with any secret")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
