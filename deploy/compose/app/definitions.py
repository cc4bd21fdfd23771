"""The journals as Dagster assets: their specs, drift from the specs, and an audit of the journals."""

from pathlib import Path

import dagster as dg

from dagster_coranto import JournalGroup, JournalResource, build_fragment_check, build_journal_specs_asset

SALES = JournalGroup("sales")
TREE = (Path(__file__).parent / "journals.yaml").read_text()

defs = dg.Definitions(
    assets=[build_journal_specs_asset(TREE), dg.AssetSpec(["sales"], description="Orders, as they are placed.")],
    asset_checks=[build_fragment_check(SALES)],
    resources={"journals": JournalResource()},
)
