"""The options of tables of PostgreSQL: `source: {postgres: …}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import yaml

from coranto.errors import InvalidInput
from coranto.ingest.option_fields import checked, choice, integer, required, seconds, text
from coranto.specs.yaml_fields import entries_of

_FIELDS: Final = (
    *("url", "publication", "slot", "operation"),
    *("toast", "truncate", "transaction", "larger", "look"),
)
_SCHEMES: Final = ("postgresql://", "postgres://")
_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}")
_NOT_IN_SLOT: Final = re.compile(r"[^a-z0-9_]")
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """The publication to read, and the form of its changes."""

    url: str
    publication: str
    slot: str = ""
    """The replication slot; empty to name it after the ingest."""
    operation: str = ""
    """The field of events with the row's operation, such as `insert`; empty to have it only in `_meta`."""
    omits_toast: bool = False
    """True to omit large values that an update did not change, if the database does not send them."""
    truncate: str = "fail"
    transaction_bytes: int = 16 * _MIB
    """The maximum bytes of changes of a transaction that is not divided."""
    divides: bool = False
    """True to divide larger transactions; otherwise they are an error."""
    poll_seconds: float = 10.0
    """The time between two checks for new tables and columns."""

    @property
    def without_schema(self) -> str:
        """Empty, because tables have a schema."""
        return ""

    def slot_of(self, ingest: str) -> str:
        """Return the name of the replication slot."""
        return self.slot or f"coranto_{_NOT_IN_SLOT.sub('_', ingest.lower())}"


def read_postgres(node: yaml.Node) -> PostgresOptions:
    """Read the options of tables. Raises InvalidInput, with the line."""
    entries = entries_of(node, _FIELDS)
    required(node, entries, "url", "publication")
    return PostgresOptions(
        checked(entries["url"], _url),
        checked(entries["publication"], _publication),
        checked(entries["slot"], _slot) if "slot" in entries else "",
        text(entries, "operation"),
        choice(entries, "toast", ("fail", "omit")) == "omit",
        choice(entries, "truncate", ("fail", "event", "skip")),
        integer(entries, "transaction", _MIB, 1024 * _MIB, 16 * _MIB),
        choice(entries, "larger", ("fail", "divide")) == "divide",
        seconds(entries, "look", 10.0),
    )


def _url(given: str) -> str:
    if not given.startswith(_SCHEMES):
        raise InvalidInput(
            "the url does not begin with postgresql://, such as postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    return given


def _publication(given: str) -> str:
    if not given or "\0" in given:
        raise InvalidInput(f"{given!r} is not a name of a publication")
    return given


def _slot(given: str) -> str:
    if not _SLOT.fullmatch(given):
        raise InvalidInput(f"{given!r} is not a name of a slot, of up to 63 small letters, digits and _")
    return given
