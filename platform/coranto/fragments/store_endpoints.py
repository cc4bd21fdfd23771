"""The allowlist of addresses in store URLs.

`?endpoint=` makes a process send requests, signed with its own identity, to an address that the URL's author chose.
URLs come from specs and requests, so their authors are all users who may apply specs or check a store's health.
So URLs may name only addresses that an operator has listed, or that the process's environment has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from coranto.errors import InvalidInput
from coranto.fragments.store_urls import StoreUrl

ANY: Final = "*"
"""The entry in a list of addresses that allows every address."""
VARIABLE: Final = "CORANTO_STORE_ENDPOINTS"
"""The variable that lists addresses for every process, including pruning, audits and checks, which have no settings."""

_OF_ENVIRONMENT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PORTS: Final = {"http": 80, "https": 443}


def first_of_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of S3 in the environment; empty if it is not set."""
    return next((value for name in _OF_ENVIRONMENT if (value := environment.get(name))), "")


class AllowedEndpoints:
    """The addresses that store URLs may name."""

    def __init__(self, text: str = "", environment: Mapping[str, str] = os.environ) -> None:
        """`text` lists URLs such as `https://minio:9000`, separated by commas or spaces; `*` allows all.

        The addresses in `environment`'s $CORANTO_STORE_ENDPOINTS and its address of S3 are allowed too. Raises
        InvalidInput.
        """
        named = f"{text},{environment.get(VARIABLE, '')}".replace(",", " ").split()
        self._any = ANY in named
        self._allowed = {_address(each) for each in named if each != ANY}
        if ours := first_of_environment(environment):
            with contextlib.suppress(InvalidInput):  # Opening a store at a bad address reports the problem.
                self._allowed.add(_address(ours))

    def require(self, url: StoreUrl) -> None:
        """Raise InvalidInput for a URL that names an address that is not allowed."""
        endpoint = url.options.get("endpoint", "")
        if not endpoint or self._any or _address(endpoint) in self._allowed:
            return
        raise InvalidInput(
            f"{url.text!r} names the endpoint {endpoint!r}, which is not among those that this process may send "
            "signed requests to; an operator adds it to the brokers' setting store_endpoints, or for any process to "
            f"${VARIABLE}",
            field="store",
        )


def _address(endpoint: str) -> tuple[str, str, int]:
    """Return scheme, host and port. Ignores the path, because the server does not depend on it. Raises InvalidInput."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidInput(f"{endpoint!r} is not a URL: {error}", field="endpoint") from None
    # Programs disagree about the host of `http://one\@other/` and similar URLs.
    odd = parts.username is not None or not endpoint.isascii() or any(char in endpoint for char in "\\@?# \t\r\n")
    if parts.scheme not in _PORTS or not host or odd:
        raise InvalidInput(f"{endpoint!r} is not http://host:port or https://host:port", field="endpoint")
    return parts.scheme, host, port or _PORTS[parts.scheme]
