"""The translation of journals into Dagster assets.

A journal's name is a path, and so is an asset key: `flights/events` becomes `["flights", "events"]`. Journal names may
have characters that keys of upstream assets may not have, so `region=eu` becomes `region_eu`. The metadata has the
original name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import dagster as dg

from coranto.client.groups import JournalGroup
from coranto.client.values import JournalInfo
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from dagster_coranto.translation.metadata import JournalMetadataSet

_UNFIT = re.compile(r"[^A-Za-z0-9_.\-]")


@dataclass(frozen=True, slots=True)
class JournalTranslatorData:
    """The input of a translation: the name of a journal or group, and the journal's spec if known."""

    name: str
    spec: pb.JournalSpec | None = None


class DagsterJournalTranslator:
    """Translates journals and groups of journals into asset specs. Override `get_asset_spec` to customize it."""

    def get_asset_key(self, data: JournalTranslatorData) -> dg.AssetKey:
        """Return the name's parts. Characters that an asset key cannot have are replaced by underscores."""
        return dg.AssetKey([_UNFIT.sub("_", part) for part in data.name.split("/")])

    def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
        spec = data.spec
        if spec is None:
            metadata = JournalMetadataSet(journal=data.name)
        else:
            types = [label.value for label in spec.labels.labels if label.name == "content-type"]
            metadata = JournalMetadataSet(
                journal=data.name,
                content_type=types[0] if types else None,
                codec=pb.CompressionCodec.Name(spec.fragment.compression_codec),
                replication=spec.replication,
                stores=", ".join(spec.fragment.stores),
            )
        return dg.AssetSpec(key=self.get_asset_key(data), kinds={"journal"}, metadata=dict(metadata))


class ComponentTranslator(DagsterJournalTranslator):
    """A translator whose specs a component modifies."""

    def __init__(self, change: Callable[[dg.AssetSpec], dg.AssetSpec]) -> None:
        self._change = change

    def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
        return self._change(super().get_asset_spec(data))


def build_group_spec(
    group: JournalGroup, dagster_journal_translator: DagsterJournalTranslator | None = None
) -> dg.AssetSpec:
    """Return the asset spec of a group of journals."""
    translator = dagster_journal_translator or DagsterJournalTranslator()
    return translator.get_asset_spec(JournalTranslatorData(group.name))


def build_journal_asset_specs(
    journals: Iterable[JournalInfo], *, dagster_journal_translator: DagsterJournalTranslator | None = None
) -> list[dg.AssetSpec]:
    """Return an external asset spec for each listed journal.

    Raises InvalidInput if two journals become the same asset. Then pass a translator with different keys for them.
    """
    translator = dagster_journal_translator or DagsterJournalTranslator()
    named: dict[dg.AssetKey, str] = {}
    specs = []
    for journal in journals:
        spec = translator.get_asset_spec(JournalTranslatorData(journal.name, journal.spec))
        other = named.setdefault(spec.key, journal.name)
        if other != journal.name:
            raise InvalidInput(
                f"journals {other} and {journal.name} are both asset {spec.key.to_user_string()}; "
                "override DagsterJournalTranslator.get_asset_spec to tell them apart",
                field="journals",
            )
        specs.append(spec)
    return specs
