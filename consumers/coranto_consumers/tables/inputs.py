"""Source journals of a table: the current ones, their content, and the layout of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coranto.client import JournalInfo, SyncJournalClient
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, value_of
from coranto.messages.checkpoints import Source
from coranto.types.blocking import SyncTypeRegistry
from coranto.types.definitions import JsonForm
from coranto.types.kinds import MapKind, PlainKind, format_kind, kinds_in
from coranto_consumers.journals.discovery import (
    ANY_LABELS,
    ContentExtent,
    contents,
    gone_segments,
    list_journals,
    unread_segment_error,
)
from coranto_consumers.journals.losses import LostContent
from coranto_consumers.tables.columns import TableLayout, layout_of
from coranto_consumers.tables.spec import TableSpec


def find_layout(client: SyncJournalClient, spec: TableSpec) -> TableLayout:
    """Return the layout of a table, with the latest version of its type. Its journals must exist.

    Raises InvalidInput for journals, a type or columns that are not supported, and the client's errors.
    """
    journals = list_journals(client, spec.input.selector, field="input", labels=ANY_LABELS)
    if (error := no_key_in_several(spec, [each.name for each in journals])) is not None:
        raise error
    if not spec.registry:
        _require_json(journals)
        layout = layout_of(spec)
    else:
        with SyncTypeRegistry(client, spec.registry) as registry:
            layout = layout_of(spec, registry.find_for(journals, spec.type))
    if spec.runner == "shard":
        _require_batches(layout)
    return layout


def no_key_in_several(spec: TableSpec, journals: Sequence[str]) -> InvalidInput | None:
    """Return the error for journals without an order between messages of one key; None if there is an order."""
    if not spec.key or spec.input.stream or spec.input.keyed or len(journals) < 2:
        return None
    return InvalidInput(
        f"{spec.input} are {len(journals)} journals ({journals[0]}, {journals[1]}, …), and of two messages of a key in "
        "different journals none is the last: read a stream, or one journal. If the producer writes each key to one "
        "journal only, say so with `keyed: true`",
        field="input",
    )


def several_journals(spec: TableSpec, journals: str) -> InvalidInput:
    """Return the error for messages of one key in several journals."""
    advice = (
        "events of a stream have an order by routing key, so choose a key whose events have one routing key"
        if spec.input.stream
        else "`keyed: true` is not true of these journals: write each key to one journal, or use a stream"
    )
    return InvalidInput(
        f"messages of one key ({', '.join(spec.key)}) are in {journals}, and none of them is the last: {advice}",
        field="key",
    )


def _require_json(journals: Sequence[JournalInfo]) -> None:
    for each in journals:
        content_type = value_of(each.spec.labels, CONTENT_TYPE)
        if content_type not in ("", JSON_LINES):
            raise InvalidInput(
                f"journal {each.name} has {CONTENT_TYPE} {content_type}, and `columns` are fields of lines of JSON: "
                "register a type of its messages, and give its `registry`",
                field="input",
            )


def _require_batches(layout: TableLayout) -> None:
    """Raise InvalidInput for messages that only Spark can read."""
    form = JsonForm() if layout.version is None else layout.version.definition.form
    if not isinstance(form, JsonForm):
        raise InvalidInput(
            f"messages of {layout.version} are {form.name}, which needs Spark: add `runner: spark`", field="runner"
        )
    for place, kind in kinds_in(layout.messages):
        if kind in (PlainKind.DATE, PlainKind.BINARY) or isinstance(kind, MapKind):
            raise InvalidInput(
                f"{place} is {format_kind(kind)}, which needs Spark: add `runner: spark`, or read it as a STRING",
                field="runner",
            )


def present_journals(client: SyncJournalClient, spec: TableSpec) -> dict[str, ContentExtent]:
    """Return the content of the current journals. Raises as `find_layout`, except for the type."""
    journals = list_journals(client, spec.input.selector, field="input", labels=ANY_LABELS)
    if (error := no_key_in_several(spec, [each.name for each in journals])) is not None:
        raise error
    return contents(client, journals)


def require_content(present: Mapping[str, ContentExtent], sources: Mapping[str, Source]) -> None:
    """Raise OffsetJump or StreamTruncated for content that is gone before it was read.

    A journal that ends before its offset, or was recreated, raises nothing here: the reader reports the reason.
    """
    for journal in sorted(gone_segments(present, sources).unread):
        raise unread_segment_error(journal, sources[journal].read_through)
    for journal in sources.keys() & present.keys():
        extent, through = present[journal], sources[journal].read_through
        if through < extent.begin <= extent.head:
            raise LostContent(journal, through, extent.begin).error("")
