"""Assets for groups of journals. A function of the user publishes, and the asset reports the effect on the journals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from coranto.client import SyncJournalClient
from coranto.errors import JournalNotFound
from dagster_coranto.groups import JournalGroup
from dagster_coranto.metadata import offsets_metadata, offsets_text, table
from dagster_coranto.resource import JournalResource, heads_of
from dagster_coranto.translator import DagsterJournalTranslator, build_group_spec

_COLUMNS = {"journal": "string", "head_before": "int", "head": "int", "bytes": "int"}


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of a publishing function: the number of messages that it committed, and optional metadata."""

    messages: int
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishContext:
    """The argument of a publishing function: Dagster's context, a client, and the group's journals in order of name."""

    dagster: dg.AssetExecutionContext
    client: SyncJournalClient
    group: JournalGroup
    journals: Sequence[str]


PublishFunction = Callable[[PublishContext], Publication]


def build_journal_group_asset(
    group: JournalGroup,
    publish: PublishFunction,
    *,
    deps: Iterable[dg.AssetKey | dg.AssetsDefinition | str] = (),
    required_resource_keys: set[str] | None = None,
    group_name: str | None = None,
    description: str | None = None,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
) -> dg.AssetsDefinition:
    """Return an asset for a group of journals, to which `publish` appends.

    Its journals are the group's journals that exist at run time, below the resource's prefix. The run fails with
    JournalNotFound when there are none. Metadata: heads (a table, and the offset vector), messages, bytes, and the
    metadata of `publish`. The data version is the vector of heads.
    """
    spec = build_group_spec(group, dagster_journal_translator)

    @dg.asset(
        key=spec.key,
        deps=list(deps),
        kinds=spec.kinds,
        metadata=spec.metadata,
        tags={tag: value for tag, value in spec.tags.items() if not tag.startswith("dagster/kind/")},
        group_name=group_name or spec.group_name,
        description=description or spec.description or f"Journals {group.name}/…",
        required_resource_keys={resource_key, *(required_resource_keys or ())},
    )
    def journal_group(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        resource: JournalResource = getattr(context.resources, resource_key)
        actual = resource.group(group)
        before = heads_of(resource.positions(group))
        if not before:
            raise JournalNotFound(f"no journal {actual.name}/… exists")
        with resource.client() as client:
            done = publish(PublishContext(context, client, actual, tuple(before)))
        after = heads_of(resource.positions(group))
        rows: list[dict[str, str | int | float | bool | None]] = [
            {"journal": name, "head_before": before.get(name, 0), "head": head, "bytes": head - before.get(name, 0)}
            for name, head in after.items()
        ]
        return dg.MaterializeResult(
            data_version=dg.DataVersion(offsets_text(after)),
            metadata={
                "messages": done.messages,
                "bytes": sum(after.values()) - sum(before.values()),
                "heads": offsets_metadata(after),
                "journals": table(rows, _COLUMNS),
                **done.metadata,
            },
        )

    return journal_group


def journal_assets(group: JournalGroup, **options: Any) -> Callable[[PublishFunction], dg.AssetsDefinition]:
    """Decorate a publishing function, to make an asset by `build_journal_group_asset` with the same options.

    The function's docstring is the default description of the asset.
    """

    def decorate(publish: PublishFunction) -> dg.AssetsDefinition:
        options.setdefault("description", publish.__doc__)
        return build_journal_group_asset(group, publish, **options)

    return decorate
