"""The file of a provider, and its mapping of claims to rights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.labels import parse_selector
from coranto.security.oidc.grants import ProviderFile, read_provider_file
from coranto.security.tokens import Capability

HEAD = 'issuer = "https://login.example"\naudience = "coranto"\n'


def file_with(*grants: dict[str, Any]) -> ProviderFile:
    return ProviderFile(issuer="https://login.example", audience="coranto", grants=grants)  # type: ignore[arg-type]


def grant(when: dict[str, Any], *capabilities: str, selector: str = "") -> dict[str, Any]:
    return {"when": when, "capabilities": capabilities or ("READ",), "selector": selector}


def test_a_file_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "provider.toml"
    path.write_text(
        f"""{HEAD}
[[grants]]
when = {{ groups = "shop", realm_access.roles = "writer" }}
capabilities = ["LIST", "READ", "APPEND"]
selector = "name:prefix=shop/"

[[grants]]
when = {{ "https://example.com/admin" = true }}
capabilities = ["LIST", "APPLY"]
selector = ""
"""
    )
    file = read_provider_file(path)
    assert file.offline_seconds == 86400
    assert not [name for name in file.algorithms if name.startswith("HS")]
    writer = {"groups": ["dev", "shop"], "realm_access": {"roles": ["writer"]}}
    rights = Capability.LIST | Capability.READ | Capability.APPEND, parse_selector("name:prefix=shop/")
    assert file.rights_of(writer) == rights
    assert file.rights_of({"groups": ["shop"]}) is None
    assert file.rights_of({"https://example.com/admin": True}) == (
        Capability.LIST | Capability.APPLY,
        parse_selector(""),
    )
    assert file.rights_of({}) is None


@pytest.mark.parametrize(
    ("when", "claims", "holds"),
    [
        ({"groups": "shop"}, {"groups": "shop"}, True),
        ({"groups": "shop"}, {"groups": ["a", "shop"]}, True),
        ({"groups": "shop"}, {"groups": ["shops", "my shop"]}, False),
        ({"groups": "shop"}, {"groups": "dev shop"}, False),
        ({"name": "admin"}, {"name": "not admin at all"}, False),
        ({"scope": "read"}, {"scope": "write read"}, True),
        ({"scp": "read"}, {"scp": "write read"}, True),
        ({"scope": "read"}, {"scope": "reads"}, False),
        ({"scope": "read"}, {"nested": {"scope": "read"}}, False),
        ({"roles": {"a": "b"}}, {"roles": {"a": ["b"]}}, True),
        ({"roles": {"a": "b"}}, {"roles": ["b"]}, False),
        ({"roles": {"a": "b"}}, {"roles": "a"}, False),
        ({"roles": "b"}, {"roles": {"b": "b"}}, False),
        ({"verified": True}, {"verified": True}, True),
        ({"verified": True}, {"verified": 1}, False),
        ({"verified": True}, {"verified": "true"}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": "b"}, {"a": None}, False),
        ({"a": "b", "c": "d"}, {"a": "b"}, False),
        ({}, {}, True),
    ],
)
def test_a_condition_matches_only_the_whole_value(when: dict[str, Any], claims: dict[str, Any], holds: bool) -> None:
    assert (file_with(grant(when)).rights_of(claims) is not None) == holds


def test_the_first_matching_grant_applies() -> None:
    file = file_with(grant({"a": "x"}, "READ"), grant({"b": "y"}, "APPEND"), grant({}, "LIST"))
    found = [file.rights_of(claims) for claims in ({"a": "x", "b": "y"}, {"b": "y"}, {"c": "z"})]
    assert [rights[0] for rights in found if rights] == [Capability.READ, Capability.APPEND, Capability.LIST]


GRANT = '[[grants]]\nwhen = {}\ncapabilities = ["READ"]\nselector = ""\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("issuer = ", "not TOML"),
        (HEAD, "grants: Field required"),
        (f"{HEAD}grants = []", "grants"),
        (f'issuer = "http://login.example"\naudience = "c"\n{GRANT}', "not an https"),
        (f'issuer = "https://me:pw@login.example"\naudience = "c"\n{GRANT}', "user name or password"),
        (f'issuer = "file:///etc/passwd"\naudience = "c"\n{GRANT}', "not an https"),
        (f'issuer = "https://login.example"\naudience = ""\n{GRANT}', "audience"),
        (f'{HEAD}algorithms = ["HS256"]\n{GRANT}', "algorithms"),
        (f'{HEAD}algorithms = ["none"]\n{GRANT}', "algorithms"),
        (f"{HEAD}offline_seconds = inf\n{GRANT}", "offline_seconds"),
        (f"{HEAD}leeway = 600\n{GRANT}", "leeway: Extra inputs"),
        (HEAD + GRANT.replace("READ", "REPLICATE"), "capabilities"),
        (HEAD + GRANT.replace("READ", "ALL"), "capabilities"),
        (HEAD + GRANT.replace('["READ"]', "[]"), "capabilities"),
        (HEAD + GRANT.replace("when = {}\n", ""), "when: Field required"),
        (HEAD + GRANT.replace('selector = ""\n', ""), "selector: Field required"),
        (HEAD + GRANT.replace('selector = ""', 'selector = "a=b="'), "selector"),
        (HEAD + GRANT.replace("{}", '{ groups = ["a", "b"] }'), "groups must be a text"),
        (HEAD + GRANT.replace("{}", '{ groups = "" }'), "groups must be a text"),
        (HEAD + GRANT.replace("{}", "{ a.b = 1 }"), "b must be a text"),
    ],
)
def test_an_invalid_file_is_refused_with_the_position(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "provider.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=problem) as refused:
        read_provider_file(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nothing\.toml cannot be read"):
        read_provider_file(tmp_path / "nothing.toml")
