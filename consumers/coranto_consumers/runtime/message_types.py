"""Registered message types as sources in columns of a shard.

An application finds its types before it runs, because `new_message` must not wait::

    with SyncTypeRegistry(client, "types/registry") as registry:
        types = registry.catalog()
    …
    def new_message(self, journal):
        return columns_of(types.find_for({journal.name: journal.labels}))

`coranto.types.framing_of` makes framings of messages that come one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coranto.errors import InvalidInput
from coranto.types.arrow import arrow_schema
from coranto.types.catalog import TypeVersion
from coranto.types.definitions import JsonForm
from coranto.types.kinds import MapKind, PlainKind, format_kind, kinds_in
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy
from coranto_consumers.runtime.columns import Columns

_MESSAGE_BY_MESSAGE: Final = "leave it out, or consume message by message (framing_of)"


def columns_of(
    version: TypeVersion,
    *,
    fields: Sequence[str] = (),
    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL,
) -> Columns:
    """Return the columns of a type's messages: these fields, or all of them.

    A TIMESTAMP without a zone is read as UTC. Raises InvalidInput for messages that are not JSON, for fields that
    batches do not support (DATE, MAP), and for fields that the type does not have.
    """
    definition = version.definition
    if not isinstance(definition.form, JsonForm):
        raise InvalidInput(
            f"{version} has the framing {definition.form.name}, and batches are of JSON: consume message by message "
            "(framing_of)",
            field="version",
        )
    known = {field.name: field for field in definition.fields}
    if unknown := [name for name in fields if name not in known]:
        raise InvalidInput(f"{version} has no field {unknown[0]}; it has {', '.join(known)}", field="fields")
    chosen = [known[name] for name in fields] if fields else list(known.values())
    for place, kind in kinds_in(chosen):
        if kind is PlainKind.DATE or isinstance(kind, MapKind):
            raise InvalidInput(
                f"{place} of {version} is {format_kind(kind)}, which batches do not have: {_MESSAGE_BY_MESSAGE}",
                field="fields",
            )
    return Columns(arrow_schema(chosen), definition.form.uuid_pointer, misfits)
