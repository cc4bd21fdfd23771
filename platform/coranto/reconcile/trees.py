"""Reconcilers for trees of journal specs, for orchestrators."""

from __future__ import annotations

from collections.abc import Sequence

from coranto.client import JournalClient
from coranto.client.groups import JournalGroup
from coranto.labels import NAME, label_selector
from coranto.reconcile.journals import JOURNALS, JournalSpecs, under_prefix
from coranto.reconcile.kinds import at_any_revision
from coranto.reconcile.reconciler import SpecReconciler
from coranto.specs.journal_tree import parse_tree


def tree_reconciler(
    client: JournalClient, tree: str, *, prefix: str = "", prune: Sequence[JournalGroup] = ()
) -> SpecReconciler:
    """Return the reconciler of a tree of journal specs in YAML, with `prefix` in front of all names.

    The plan deletes journals of the groups `prune`, below the same prefix, that the tree does not name. Raises
    InvalidInput for text that is not a tree of specs.
    """
    wanted = under_prefix(at_any_revision(parse_tree(tree)), prefix)
    groups = [(f"{NAME}:prefix", f"{group.under(prefix).name}/") for group in prune]
    selector = label_selector(include=groups) if groups else None
    return SpecReconciler(JOURNALS, JournalSpecs(client), wanted, source="the tree of specs", prune=selector)
