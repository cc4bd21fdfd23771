"""Signed reports."""

from __future__ import annotations

import base64
import json

import jwt
import pytest

from coranto.audit.signing import sign_report, verify_report
from coranto.errors import InvalidInput, Unauthenticated
from coranto.security.tokens import Capability, Claims, Keys, sign
from tests.platform.audit.reports import LOST, report_of

KEYS = Keys.parse(base64.b64encode(b"k" * 32).decode())


OTHERS = Keys.parse(base64.b64encode(b"o" * 32).decode())


async def test_a_signed_report_is_verified_with_any_of_the_keys() -> None:
    report = await report_of(LOST)
    signed = sign_report(report, KEYS)
    assert verify_report(f"  {signed}\n", Keys((*OTHERS.secrets, *KEYS.secrets))) == report


async def test_a_changed_report_is_refused() -> None:
    header, payload, signature = sign_report(await report_of(LOST), KEYS).split(".")
    content = json.loads(base64.urlsafe_b64decode(payload + "=="))
    content["findings"] = []
    changed = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    with pytest.raises(Unauthenticated, match="changed after it was signed"):
        verify_report(f"{header}.{changed}.{signature}", KEYS)


async def test_a_report_signed_with_another_key_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="key that is not among"):
        verify_report(sign_report(await report_of(), OTHERS), KEYS)


async def test_an_unsigned_report_is_refused() -> None:
    payload = (await report_of()).to_json().encode()
    unsigned = jwt.PyJWS(algorithms=["none"]).encode(payload, None, algorithm="none", headers={"typ": "coranto-audit"})
    with pytest.raises(Unauthenticated, match="was changed after it was signed"):
        verify_report(unsigned, KEYS)


async def test_a_token_and_other_text_are_refused_as_reports() -> None:
    with pytest.raises(InvalidInput, match="type 'JWT'"):
        verify_report(sign(Claims(Capability.ALL, iat=0, exp=1), KEYS), KEYS)
    for text in ("", "a.b.c", (await report_of()).to_json()):
        with pytest.raises(InvalidInput, match="not a signed report"):
            verify_report(text, KEYS)
