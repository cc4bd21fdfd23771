"""An asset that applies journal specs from a YAML file."""

from collections.abc import Callable
from pathlib import Path

import dagster as dg

from coranto.client import SyncJournalClient
from coranto.errors import EtcdTransactionFailed
from coranto.specs.journal_tree import parse_tree
from coranto.wire import protocol_pb2 as pb
from dagster_coranto.metadata import table
from dagster_coranto.resource import JournalResource
from dagster_coranto.specs import ChangeKind, SpecChange, SpecPlan, plan_specs, under_prefix

_ATTEMPTS = 5
_COLUMNS = {
    "journal": "string",
    "change": "string",
    "replication": "int",
    "codec": "string",
    "fragment_length": "int",
    "stores": "string",
    "differences": "string",
}


def build_journal_specs_asset(
    specs: str | Path | Callable[[], str],
    *,
    name: str = "journal_specs",
    key_prefix: str | list[str] | None = None,
    group_name: str | None = None,
    description: str | None = None,
    resource_key: str = "journals",
) -> dg.AssetsDefinition:
    """Return an asset that applies a tree of journal specs.

    `specs` is the path of a YAML file, its text, or a function that returns the text. Applying is idempotent: the tree
    is compared with the existing journals, and only differences are applied, in one transaction. If somebody else
    changes one of the journals meanwhile, the comparison is repeated. Journals outside the tree are not changed.
    Metadata: counts, and a table with the change of each journal. The data version is a digest of the tree.
    """

    @dg.asset(
        name=name,
        key_prefix=key_prefix,
        group_name=group_name,
        description=description or "The specs of journals, kept as a tree of YAML says.",
        kinds={"journal", "yaml"},
        required_resource_keys={resource_key},
    )
    def journal_specs(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        journals: JournalResource = getattr(context.resources, resource_key)
        wanted = under_prefix(parse_tree(_text(specs)), journals.prefix)
        with journals.client() as client:
            plan = apply_specs(client, wanted)
        for entry in plan.entries:
            if entry.change is not ChangeKind.UNCHANGED:
                context.log.info(f"{entry.journal}: {entry.change.value} {'; '.join(entry.differences)}".rstrip())
        counts = {
            change.value: plan.count(change)
            for change in (ChangeKind.CREATED, ChangeKind.CHANGED, ChangeKind.UNCHANGED)
        }
        return dg.MaterializeResult(
            data_version=dg.DataVersion(plan.version),
            metadata={
                **counts,
                "deleted": plan.count(ChangeKind.DELETED),
                "journals": table([_row(entry) for entry in plan.entries], _COLUMNS),
            },
        )

    return journal_specs


def apply_specs(client: SyncJournalClient, wanted: list[pb.ApplyRequest.Change]) -> SpecPlan:
    """Apply the changes of a tree, and return the plan that was applied.

    Raises EtcdTransactionFailed when others keep changing the same journals, or when the tree names a revision that is
    not the journal's.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        plan = plan_specs(wanted, client.list().journals)
        if not plan.request:
            return plan
        try:
            client.apply(plan.request)
        except EtcdTransactionFailed:
            if attempt == _ATTEMPTS:
                raise
        else:
            return plan
    raise AssertionError("unreachable: the last attempt returns or raises")


def _text(specs: str | Path | Callable[[], str]) -> str:
    if callable(specs):
        return specs()
    return specs.read_text() if isinstance(specs, Path) else specs


def _row(entry: SpecChange) -> dict[str, str | int | float | bool | None]:
    spec = entry.spec if entry.spec is not None else pb.JournalSpec()
    return {
        "journal": entry.journal,
        "change": entry.change.value,
        "replication": spec.replication,
        "codec": pb.CompressionCodec.Name(spec.fragment.compression_codec),
        "fragment_length": spec.fragment.length,
        "stores": ", ".join(spec.fragment.stores),
        "differences": "; ".join(entry.differences),
    }
