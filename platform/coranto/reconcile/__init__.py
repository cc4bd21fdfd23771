"""Reconciliation of the specs of journals and shards in etcd with a document, for commands and orchestrators.

`kinds` has the differences between kinds of specs, `plan` compares (pure), and `reconciler` applies in transactions.
"""

from coranto.reconcile.journals import JOURNALS, JournalSpecs, under_prefix
from coranto.reconcile.kinds import PresentSpec, SpecAccess, SpecChange, SpecKind, at_any_revision
from coranto.reconcile.plan import SpecAction, SpecPlan, SpecStep, make_plan
from coranto.reconcile.reconciler import SpecReconciler
from coranto.reconcile.trees import tree_reconciler

__all__ = [
    "JOURNALS",
    "JournalSpecs",
    "PresentSpec",
    "SpecAccess",
    "SpecAction",
    "SpecChange",
    "SpecKind",
    "SpecPlan",
    "SpecReconciler",
    "SpecStep",
    "at_any_revision",
    "make_plan",
    "tree_reconciler",
    "under_prefix",
]
