"""The file that names a provider, and maps the claims of its tokens to capabilities and journals.

::

    issuer = "https://login.example.com/realms/data"
    audience = "coranto"

    [[grants]]
    when = { groups = "shop" }
    capabilities = ["LIST", "READ", "APPEND"]
    selector = "name:prefix=shop/"

The first grant whose `when` matches a token applies. A token that matches no grant has no rights.
"""

from __future__ import annotations

import functools
import operator
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from coranto.errors import InvalidInput
from coranto.labels import parse_selector
from coranto.security.oidc.http import require_private_url
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb

_SCOPES: Final = ("scope", "scp")
"""Claims whose text is a list of words (RFC 8693, RFC 9068)."""

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""The algorithms of signatures that a public key verifies. Shared secrets (HS256) are excluded."""
Word = Annotated[str, Field(min_length=1)]


def _conditions(conditions: dict[str, Any]) -> dict[str, Any]:
    for name, expected in conditions.items():
        if isinstance(expected, dict):
            _conditions(expected)
        elif not isinstance(expected, str | bool) or expected == "":
            raise ValueError(f"{name} must be a text, true, false or a table of them")
    return conditions


def _private(url: str) -> str:
    require_private_url(url, "issuer")
    return url


def _selects(selector: str) -> str:
    parse_selector(selector)
    return selector


class Grant(BaseModel):
    """The rights of the tokens whose claims meet all conditions of `when`.

    A condition holds if the claim equals its value, is a list that contains it, or is a `scope` with that word. A table
    has conditions for nested claims. An empty `selector` matches all journals.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    when: Annotated[dict[str, Any], AfterValidator(_conditions)]
    capabilities: tuple[Literal["LIST", "APPLY", "READ", "APPEND", "NOTE"], ...] = Field(min_length=1)
    selector: Annotated[str, AfterValidator(_selects)]

    @functools.cached_property
    def rights(self) -> tuple[Capability, pb.LabelSelector]:
        capabilities = (Capability[name] for name in self.capabilities)
        return functools.reduce(operator.or_, capabilities), parse_selector(self.selector)


class ProviderFile(BaseModel):
    """A provider whose tokens are accepted."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    issuer: Annotated[str, AfterValidator(_private)]
    audience: Word
    algorithms: tuple[Algorithm, ...] = Field(default=("RS256", "PS256", "ES256", "EdDSA"), min_length=1)
    offline_seconds: float = Field(default=86400.0, gt=0, allow_inf_nan=False)
    """The maximum time in seconds to use the last fetched keys while the provider does not respond."""
    grants: tuple[Grant, ...] = Field(min_length=1)

    def rights_of(self, content: Mapping[str, Any]) -> tuple[Capability, pb.LabelSelector] | None:
        """Return the rights of a token by its claims, or None if no grant matches."""
        words = {name: text.split(" ") for name in _SCOPES if isinstance(text := content.get(name), str)}
        claims = {**content, **words}
        return next((grant.rights for grant in self.grants if _holds(grant.when, claims)), None)


def read_provider_file(path: Path) -> ProviderFile:
    """Return the content of a provider's file. Raises InvalidInput."""
    try:
        return ProviderFile(**tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="oidc") from error
    except ValidationError as error:
        found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise InvalidInput(f"{path}: {'; '.join(found)}", field="oidc") from None
    except ValueError as error:
        raise InvalidInput(f"{path} is not TOML: {error}", field="oidc") from None


def _holds(expected: object, found: object) -> bool:
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(_holds(value, found.get(name)) for name, value in expected.items())
    values = found if isinstance(found, list) else [found]
    return any(type(each) is type(expected) and each == expected for each in values)
