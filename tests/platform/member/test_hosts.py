"""Settings that make a member trust local callers without keys."""

from __future__ import annotations

import base64
from pathlib import Path

from pydantic import SecretStr

from coranto.member.hosts import trusts_the_machine
from coranto_broker.settings import BrokerSettings

KEY = base64.b64encode(bytes([1]) * 32).decode()


def test_only_loopback_without_tls_trusts_the_machine(tmp_path: Path) -> None:
    plain = BrokerSettings(host="127.0.0.1")
    assert trusts_the_machine(plain)
    assert trusts_the_machine(plain.model_copy(update={"host": "::1"}))
    assert trusts_the_machine(plain.model_copy(update={"auth_keys": SecretStr(f"AA==,{KEY}")}))
    assert not trusts_the_machine(plain.model_copy(update={"auth_keys": SecretStr(KEY)}))
    assert not trusts_the_machine(plain.model_copy(update={"host": "0.0.0.0"}))
    assert not trusts_the_machine(plain.model_copy(update={"tls_cert": tmp_path, "tls_key": tmp_path}))
