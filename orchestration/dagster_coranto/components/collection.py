"""A component for a collection of journals: an asset for each folder, or each journal, of a selector.

The journals come from the component's tree of specs, and from the listing of the last refresh of its state
(`dg utils refresh-defs-state`). Loading definitions reads both, and calls no broker.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import dagster as dg
from dagster.components import DefsStateConfig, DefsStateConfigArgs, ResolvedDefsStateConfig
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import Field

from coranto.audit import Depth
from coranto.client.groups import JournalGroup
from coranto.labels import as_pairs, matcher, parse_selector, with_meta
from coranto.specs.journal_tree import parse_tree
from coranto.wire import protocol_pb2 as pb
from dagster_coranto.components.cluster import ClusterModel, resolve_cluster, shared_resource
from dagster_coranto.components.project_keys import keys_of_other_components
from dagster_coranto.components.scaffolding import JournalCollectionScaffolder
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.specs.journals import build_journal_specs_asset, build_journal_specs_check
from dagster_coranto.translation.options import with_deps
from dagster_coranto.translation.translator import DagsterJournalTranslator, JournalTranslatorData
from dagster_coranto.verification.checks import build_audit_check


@dataclass(frozen=True, slots=True)
class JournalProps:
    """The journal or folder of a translation in YAML: `{{ journal.name }}`, `{{ journal.labels.app }}`.

    A folder has the labels of its first journal.
    """

    name: str
    labels: Mapping[str, str]
    replication: int
    journals: int
    """The number of journals of a folder. 1 for a journal."""
    spec: pb.JournalSpec | None = None
    """The journal's spec. None for a folder."""


@dg.scaffold_with(JournalCollectionScaffolder)
class JournalCollectionComponent(dg.StateBackedComponent, dg.Model, dg.Resolvable):
    """Journals of a cluster as assets, and optionally their specs from a tree in YAML.

    Assets and checks that another part of the project defines, such as the outputs of a consumer, are omitted.
    """

    cluster: Annotated[JournalResource, dg.Resolver(resolve_cluster, model_field_type=ClusterModel)] = Field(
        default_factory=JournalResource, description="The cluster of brokers. Default: from the environment."
    )
    selector: str = Field(
        description="Label selector of journals.", examples=["name:prefix=shop/", "content-type=application/x-ndjson"]
    )
    assets: Literal["folder", "journal"] = Field(
        default="folder",
        description="The journals of one asset: all of one folder (shop/orders for shop/orders/part-000), or each "
        "journal.",
    )
    specs: str | None = Field(
        default=None,
        description="File with a tree of journal specs, in the folder of defs.yaml. It becomes a check of drift, and "
        "an asset that applies the tree and that the journals' assets depend on.",
        examples=["journals.yaml"],
    )
    specs_asset: str = Field(default="journal_specs", description="The key of the asset that applies `specs`.")
    audits: list[Literal["cheap", "deep"]] = Field(
        default=["cheap"],
        description="The checks of each folder. A cheap audit reads no content; a deep one reads content up to a "
        "budget, and continues from there the next time.",
    )
    translation: (
        Annotated[
            TranslationFn[JournalProps],
            TranslationFnResolver(template_vars_for_translation_fn=lambda journal: {"journal": journal}),
        ]
        | None
    ) = Field(
        default=None,
        description="Attributes of the assets, with `journal` (name, labels, replication, journals) and `spec`.",
        examples=[{"group_name": "shop", "owners": ["team:shop"], "key": "journals/{{ journal.name }}"}],
    )
    # Definitions load even if the cluster is down.
    defs_state: ResolvedDefsStateConfig = DefsStateConfigArgs.local_filesystem().model_copy(
        update={"refresh_if_dev": False}
    )

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="Journals of Coranto as assets, with specs from YAML.", tags=["integration", "streaming"]
        )

    @property
    def defs_state_config(self) -> DefsStateConfig:
        place = self.cluster.endpoint or self.cluster.data_dir or "default"
        key = f"{type(self).__name__}[{place}][{self.cluster.prefix}][{self.selector}]"
        return DefsStateConfig.from_args(self.defs_state, default_key=key)

    def write_state_to_path(self, state_path: Path) -> None:
        """List the journals, and write their specs as the state."""
        prefix = self.cluster.prefix
        with self.cluster.client() as client:
            listed = client.list(f"name:prefix={prefix}" if prefix else self.selector).journals
        specs = []
        for info in listed:
            spec = pb.JournalSpec()
            spec.CopyFrom(info.spec)
            spec.name = spec.name.removeprefix(prefix)
            specs.append(spec)
        state_path.write_text(json.dumps([MessageToDict(spec) for spec in self._selected(specs).values()]))

    def _selected(self, specs: Iterable[pb.JournalSpec]) -> dict[str, pb.JournalSpec]:
        matches = matcher(parse_selector(self.selector))
        return {spec.name: spec for spec in specs if matches(with_meta(spec.name, spec.labels))}

    def get_asset_spec(self, data: JournalProps) -> dg.AssetSpec:
        """Return the asset spec of a journal or folder. Override this for changes that YAML cannot express."""
        spec = DagsterJournalTranslator().get_asset_spec(JournalTranslatorData(data.name, data.spec))
        return spec if self.translation is None else self.translation(spec, data)

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:
        journals = {} if state_path is None else _read_state(state_path)
        key, cluster = shared_resource("journals", self.cluster)
        assets: list[Any] = []
        checks: list[Any] = []
        deps: list[dg.AssetKey] = []
        if self.specs is not None:
            tree = context.path / self.specs
            journals |= self._selected(change.upsert for change in parse_tree(tree.read_text()) if not change.delete)
            applying = build_journal_specs_asset(tree, name=self.specs_asset, resource_key=key)
            assets += dg.with_resources([applying], {key: cluster})
            checks.append(build_journal_specs_check(tree, asset=applying.key, resource_key=key))
            deps.append(applying.key)
        translator = _Translations(self)
        others = keys_of_other_components(context, JournalCollectionComponent)
        for name, members in sorted(self._named(journals.values()).items()):
            translator.members[name] = members
            spec = with_deps(translator.get_asset_spec(JournalTranslatorData(name)), deps)
            if spec.key not in others.assets:
                assets.append(spec)
            if not all(spec.name.startswith(f"{name}/") for spec in members):
                continue  # An audit checks groups, and a journal is not a group.
            group = JournalGroup(name)
            audits = [
                build_audit_check(group, depth=depth, dagster_journal_translator=translator, resource_key=key)
                for depth in map(Depth, self.audits)
            ]
            checks += [each for each in audits if others.checks.isdisjoint(each.check_keys)]
        return dg.Definitions(assets=assets, asset_checks=dg.with_resources(checks, {key: cluster}))

    def _named(self, journals: Iterable[pb.JournalSpec]) -> dict[str, list[pb.JournalSpec]]:
        named: dict[str, list[pb.JournalSpec]] = {}
        for spec in sorted(journals, key=lambda spec: spec.name):
            folder = spec.name.rpartition("/")[0]
            named.setdefault(spec.name if self.assets == "journal" or not folder else folder, []).append(spec)
        return named


def _read_state(path: Path) -> dict[str, pb.JournalSpec]:
    specs = [ParseDict(fields, pb.JournalSpec()) for fields in json.loads(path.read_text())]
    return {spec.name: spec for spec in specs}


class _Translations(DagsterJournalTranslator):
    """The component's translation as a translator, for the builders of checks."""

    def __init__(self, component: JournalCollectionComponent) -> None:
        self._component = component
        self.members: dict[str, list[pb.JournalSpec]] = {}

    def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
        members = self.members[data.name]
        first = members[0]
        shown = first if self._component.assets == "journal" else None
        labels = dict(as_pairs(first.labels))
        return self._component.get_asset_spec(JournalProps(data.name, labels, first.replication, len(members), shown))
