"""The resource of a SQL store: consumers' tables and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field, field_validator

from coranto.errors import InvalidInput
from dagster_coranto.resources.hidden import hide, reveal

if TYPE_CHECKING:
    from coranto_consumers.stores.fencing import Restored
    from coranto_consumers.stores.sql import SqlStore

STORE_VARIABLE: Final = "CORANTO_STORE_URL"


class SqlStoreResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # its value is itself
    """A SQL store of consumers: SQLite, PostgreSQL, MariaDB or MySQL.

    Give the URL as `dg.EnvVar("…")` if it has a password. Dagster shows a literal URL without its secrets.
    """

    url: str = Field(
        default="",
        description="SQLAlchemy URL, such as postgresql+psycopg://user:password@host/database or "
        "sqlite:////absolute/path/store.db. Empty: $CORANTO_STORE_URL.",
    )

    @field_validator("url", mode="before")
    @classmethod
    def _hide(cls, value: object) -> object:
        return hide_password(value) if isinstance(value, str) else value

    def url_with_password(self) -> str:
        """Return the URL with its password. Do not print it. Raises InvalidInput if no URL is given."""
        found = reveal(self.url) or os.environ.get(STORE_VARIABLE, "")
        if not found:
            raise InvalidInput(f"no SQL store is given; set the resource's url, or ${STORE_VARIABLE}", field="url")
        return found

    def store(self) -> SqlStore:
        """Return the store. Raises InvalidInput if the URL is not of a SQL store."""
        from coranto_consumers.stores.sql import SqlStore

        return SqlStore(self.url_with_password())

    def read(self, consumer: str) -> Restored | None:
        """Return a consumer's fence and last committed checkpoint. None if it has never started."""
        return self.store().read(consumer)

    def offsets(self, consumer: str) -> Mapping[str, int] | None:
        """Return the offsets through which a consumer has committed. None if it has never committed."""
        found = self.read(consumer)
        if found is None or not found.checkpoint.sources:
            return None
        return found.checkpoint.offsets


def hide_password(url: str) -> str:
    """Return a URL unchanged if it has no secret; otherwise a placeholder that shows the rest of it."""
    from coranto_consumers.stores.urls import display_url, parse_store_url

    if not url or isinstance(url, dg.EnvVar) or "://" not in url:
        return url
    try:
        shown = display_url(parse_store_url(url))
        plain = parse_store_url(url).render_as_string(hide_password=False)
    except InvalidInput:
        return hide(url)  # The URL is invalid, so any part may be secret.
    return url if shown == plain else hide(url, shown)
