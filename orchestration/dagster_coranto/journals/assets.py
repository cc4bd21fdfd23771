"""Assets for groups of journals. A user's function publishes, and the asset reports the effect on the journals."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Unpack

import dagster as dg

from coranto.client import SyncJournalClient
from coranto.client.groups import JournalGroup
from coranto.client.positions import heads_of
from coranto.errors import JournalNotFound
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import resource_arguments, resource_of, resource_parameters
from dagster_coranto.translation.metadata import GroupMetadataSet, JournalRow, offsets_metadata, table, vector_version
from dagster_coranto.translation.options import AssetOptions, op_options, spec_options, with_deps, with_options
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec

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


PublishFunction = Callable[..., Publication]
"""Takes a PublishContext, and a resource for each further parameter that is annotated with a resource's class."""


def build_journal_group_asset(
    group: JournalGroup,
    publish: PublishFunction,
    *,
    deps: Iterable[Any] = (),
    required_resource_keys: Set[str] = frozenset(),
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    **options: Unpack[AssetOptions],
) -> dg.AssetsDefinition:
    """Return an asset for a group of journals that `publish` appends to.

    `publish` gets a PublishContext, and a resource for each other parameter that is annotated with a resource's class.
    The group's journals are those that exist at run time, below the resource's prefix. The run fails with
    JournalNotFound if there are none. All fields of the translator's spec take effect; AssetOptions describes the
    effect of options. Metadata: heads (a table, and the offset vector), messages, bytes, and the metadata of `publish`.
    The data version is a digest of the vector of heads.
    """
    spec = build_group_spec(group, dagster_journal_translator)
    spec = with_deps(with_options(spec, spec_options(options)), deps)
    spec = with_options(spec, {"description": f"Journals {group.name}/…"})

    @dg.multi_asset(
        name=spec.key.to_python_identifier(),
        specs=[spec],
        required_resource_keys={resource_key, *required_resource_keys, *resource_parameters(publish)},
        **op_options(options),
    )
    def journal_group(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        resource = resource_of(context.resources, resource_key, JournalResource)
        actual = resource.group(group)
        before = heads_of(resource.positions(group))
        if not before:
            raise JournalNotFound(f"no journal {actual.name}/… exists; create one (`coranto journals apply`)")
        with resource.client() as client:
            arguments = resource_arguments(publish, context.resources)
            done = publish(PublishContext(context, client, actual, tuple(before)), **arguments)
        after = heads_of(resource.positions(group))
        rows: list[JournalRow] = [
            {"journal": name, "head_before": before.get(name, 0), "head": head, "bytes": head - before.get(name, 0)}
            for name, head in after.items()
        ]
        return dg.MaterializeResult(
            data_version=vector_version(after),
            metadata={
                **GroupMetadataSet(
                    messages=done.messages,
                    bytes=sum(after.values()) - sum(before.values()),
                    head=sum(after.values()),
                    heads=offsets_metadata(after),
                    journals=table(rows, _COLUMNS),
                ),
                **done.metadata,
            },
        )

    return journal_group


def journal_assets(
    group: JournalGroup,
    *,
    deps: Iterable[Any] = (),
    required_resource_keys: Set[str] = frozenset(),
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    **options: Unpack[AssetOptions],
) -> Callable[[PublishFunction], dg.AssetsDefinition]:
    """Turn a publishing function into an asset, by `build_journal_group_asset` with the same options.

    The function's docstring is the default description of the asset.
    """

    def decorate(publish: PublishFunction) -> dg.AssetsDefinition:
        described: AssetOptions = {**options, "description": options.get("description") or publish.__doc__}
        return build_journal_group_asset(
            group,
            publish,
            deps=deps,
            required_resource_keys=required_resource_keys,
            dagster_journal_translator=dagster_journal_translator,
            resource_key=resource_key,
            **described,
        )

    return decorate
