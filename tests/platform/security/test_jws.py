"""Texts signed with the keys of a cluster."""

from __future__ import annotations

import base64
import json

import pytest

from coranto.security.jws import Signed, claimed_header, sign, verify
from coranto.security.tokens import Keys


def keys_of(*secrets: bytes) -> Keys:
    return Keys.parse(",".join(base64.b64encode(secret * 32).decode() for secret in secrets))


def test_a_text_signed_by_any_key_is_read_with_its_header() -> None:
    old, new, other = keys_of(b"o"), keys_of(b"n", b"o"), keys_of(b"x")
    text = sign(b"content", old, {"typ": "note", "name": "a/b"})
    header = {"alg": "HS256", "typ": "note", "name": "a/b"}
    assert verify(text, new) == Signed(header, b"content")
    assert verify(text.encode(), old) == Signed(header, b"content")
    assert verify(text, other) is None


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_text_with_a_changed_part_is_rejected(part: int) -> None:
    keys = keys_of(b"k")
    parts = sign(b"content", keys, {"typ": "note"}).split(".")
    others = sign(b"Content", keys_of(b"z"), {"typ": "node"}).split(".")
    assert verify(".".join((*parts[:part], others[part], *parts[part + 1 :])), keys) is None


def test_a_text_that_declares_no_signature_is_rejected() -> None:
    encoded = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "note"}).encode()).rstrip(b"=").decode()
    assert verify(f"{encoded}.Y29udGVudA.", keys_of(b"k")) is None
    assert claimed_header(f"{encoded}.Y29udGVudA.") == {"alg": "none", "typ": "note"}


@pytest.mark.parametrize("text", ["", "a.b", "not a text", "....", "eyJ9.x.y"])
def test_other_texts_have_no_header(text: str) -> None:
    assert claimed_header(text) is None
    assert verify(text, keys_of(b"k")) is None
