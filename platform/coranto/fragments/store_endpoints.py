"""Addresses that store URLs may name.

`?endpoint=` has a process send requests that are signed with its own identity to an address that the URL's author
chose. URLs come from specs and from requests, and so from whoever may apply specs or ask for a store's health. They
therefore may name only addresses that an operator has listed, or that the process is told of by its environment.
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
"""In a list of addresses: every address may be named."""
VARIABLE: Final = "CORANTO_STORE_ENDPOINTS"
"""Lists addresses for every process, also those that have no settings: pruning, audits and checks."""

_OF_ENVIRONMENT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PORTS: Final = {"http": 80, "https": 443}


def first_of_environment(environment: Mapping[str, str] = os.environ) -> str:
    """The address of S3 that the environment names; empty when it names none."""
    return next((value for name in _OF_ENVIRONMENT if (value := environment.get(name))), "")


class AllowedEndpoints:
    """The addresses that store URLs may name."""

    def __init__(self, text: str = "", environment: Mapping[str, str] = os.environ) -> None:
        """`text` lists URLs such as `https://minio:9000`, with commas or spaces between them; `*` stands for all.

        Those that `environment` lists in $CORANTO_STORE_ENDPOINTS, and the address that it names for S3, are among
        them. Raises InvalidInput.
        """
        named = f"{text},{environment.get(VARIABLE, '')}".replace(",", " ").split()
        self._any = ANY in named
        self._allowed = {_address(each) for each in named if each != ANY}
        if ours := first_of_environment(environment):
            with contextlib.suppress(InvalidInput):  # Stores that would be reached there say what is wrong with it.
                self._allowed.add(_address(ours))

    def require(self, url: StoreUrl) -> None:
        """Raises InvalidInput for a URL that names an address which is not listed."""
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
    """Scheme, host and port. A path says nothing of who answers. Raises InvalidInput."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidInput(f"{endpoint!r} is not a URL: {error}", field="endpoint") from None
    # Programs differ over who is meant by `http://one\@other/` and the like.
    odd = parts.username is not None or not endpoint.isascii() or any(char in endpoint for char in "\\@?# \t\r\n")
    if parts.scheme not in _PORTS or not host or odd:
        raise InvalidInput(f"{endpoint!r} is not http://host:port or https://host:port", field="endpoint")
    return parts.scheme, host, port or _PORTS[parts.scheme]
