"""The input that a Spark consumer has skipped, as an asset check: dead letters, and lost content.

A run adds the input that it has skipped to the counts of the check's last evaluation, once its transaction is
committed. So the check fails until a person accepts the counts, and a later run without skipped input does not hide
them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import dagster as dg
from pydantic import Field

from coranto.errors import InvalidInput
from coranto.telemetry import amount
from coranto_consumers.outputs.dead_letters import DeadLetters
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from dagster_coranto.consumers.definition import SparkConsumerDefinition, consumers_of
from dagster_coranto.instance.evaluations import last_evaluation
from dagster_coranto.translation.metadata import JournalRow, namespaced, table
from dagster_coranto.translation.metadata_set import NAMESPACE

if TYPE_CHECKING:
    from coranto_consumers.journals.losses import LostContent
    from coranto_consumers.spark.consumer.progress import ConsumeReport

CHECK_NAME: Final = "nothing_left_out"
_COLUMNS = {"journal": "string", "begin": "int", "end": "int", "bytes": "int", "recreated": "bool"}
_SHOWN: Final = 10
_COUNTS = ("dead_letters", "lost_ranges", "lost_bytes")


@dataclass(frozen=True, slots=True)
class SkippedInput:
    """The input that a consumer has skipped."""

    dead_letters: int = 0
    lost: tuple["LostContent", ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """The counts, which the check sums over runs."""
        return {
            "dead_letters": self.dead_letters,
            "lost_ranges": len(self.lost),
            "lost_bytes": sum(max(0, each.end - each.begin) for each in self.lost),
        }

    def __str__(self) -> str:
        shown = [str(each) for each in self.lost[:_SHOWN]]
        return "; ".join([_summary(self.counts), *shown])


class SkippedInputWatch:
    """Reports the skipped input of one run: losses once they are committed, and dead letters at most every `seconds`.

    `report` returns False if it failed; the next report then includes the same input.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        report: Callable[[SkippedInput], bool],
        seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_dead_letters = isinstance(options.misfits, DeadLetters)
        self._report = report
        self._seconds = seconds
        self._monotonic = monotonic
        self._due = monotonic()
        self._committed = SkippedInput()
        self._reported = SkippedInput()
        self._transactions = 0

    def record(self, report: "ConsumeReport") -> None:
        """Record the progress of the run. Ignores uncommitted skips: the next run finds them again."""
        if report.transactions == self._transactions:
            return
        self._transactions = report.transactions
        self._committed = SkippedInput(report.misfits if self._has_dead_letters else 0, report.lost)
        if self._committed.lost != self._reported.lost or self._monotonic() >= self._due:
            self.finish()

    def finish(self) -> None:
        """Report skipped input that is not reported yet."""
        reported, now = self._reported, self._committed
        if now != reported:
            self._due = self._monotonic() + self._seconds
            if self._report(SkippedInput(now.dead_letters - reported.dead_letters, now.lost[len(reported.lost) :])):
                self._reported = now


def report_skipped_input(instance: dg.DagsterInstance, definition: SparkConsumerDefinition, new: SkippedInput) -> None:
    """Add skipped input to the counts of the check of a consumer's assets."""
    for asset in definition.keys:
        known = _known(instance, asset)
        result = _result(asset, {name: known[name] + count for name, count in new.counts.items()}, new.lost)
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=asset,
                check_name=CHECK_NAME,
                passed=result.passed,
                metadata=result.metadata,
                severity=result.severity,
                description=result.description,
            )
        )


class LeftOutConfig(dg.Config):
    """The configuration of one evaluation of the check."""

    accept: bool = Field(default=False, description="Accept everything skipped so far: the check passes again.")


def build_left_out_check(consumer: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    """Return the check `nothing_left_out` of the assets of `spark_consumer_assets`.

    It fails when the consumer has skipped lost content (`fail_on_data_loss=False`), and warns of dead letters. Runs of
    the consumer, and `dagster_coranto.serve`, report both as they happen, so the check needs no schedule. It stays
    failed until it is evaluated with `accept: true` in its configuration. The counts are in the consumer's Dagster
    instance; another instance does not have them.
    """
    definition = next(consumers_of([consumer]), None)
    if definition is None:
        raise InvalidInput("these are not the assets of a Spark consumer", field="consumer")

    @dg.multi_asset_check(
        name=f"{definition.name}__{CHECK_NAME}",
        specs=[
            dg.AssetCheckSpec(
                CHECK_NAME, asset=asset, description="The consumer has processed all content and all messages."
            )
            for asset in definition.keys
        ],
        can_subset=True,
    )
    def nothing_left_out(context: dg.AssetCheckExecutionContext, config: LeftOutConfig) -> Any:
        for key in sorted(context.selected_asset_check_keys):
            known = _known(context.instance, key.asset_key)
            if config.accept:
                context.log.info(f"{key.asset_key.to_user_string()}: accepts {_summary(known)}.")
                known = dict.fromkeys(_COUNTS, 0)
            yield _result(key.asset_key, known)

    return nothing_left_out


def _known(instance: dg.DagsterInstance, asset: dg.AssetKey) -> dict[str, int]:
    """Return the counts of the last evaluation of an asset's check."""
    last = last_evaluation(instance, dg.AssetCheckKey(asset, CHECK_NAME))
    values = {name: last.metadata.get(f"{NAMESPACE}/{name}") if last is not None else None for name in _COUNTS}
    return {
        name: value.value if isinstance(value, dg.IntMetadataValue) and value.value is not None else 0
        for name, value in values.items()
    }


def _result(asset: dg.AssetKey, counts: dict[str, int], lost: Sequence["LostContent"] = ()) -> dg.AssetCheckResult:
    passed = not any(counts.values())
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=CHECK_NAME,
        passed=passed,
        severity=dg.AssetCheckSeverity.ERROR if counts["lost_ranges"] else dg.AssetCheckSeverity.WARN,
        metadata=namespaced({**counts, **({"lost": lost_table(lost)} if lost else {})}),
        description="nothing was left out" if passed else _summary(counts),
    )


def _summary(counts: dict[str, int]) -> str:
    letters, ranges = counts["dead_letters"], counts["lost_ranges"]
    parts = []
    if ranges:
        parts.append(
            f"{ranges} range{'s' * (ranges != 1)} of content ({amount(counts['lost_bytes'], 'bytes')}) "
            "gone before it was read"
        )
    if letters:
        parts.append(f"{letters:,} dead letter{'s' * (letters != 1)}")
    return "; ".join(parts) or "nothing"


def lost_table(lost: Sequence["LostContent"]) -> dg.TableMetadataValue:
    """Return a table of lost content, for display."""
    rows: list[JournalRow] = [
        {
            "journal": each.journal,
            "begin": each.begin,
            "end": each.end,
            "bytes": max(0, each.end - each.begin),
            "recreated": each.recreated,
        }
        for each in lost
    ]
    return table(rows, _COLUMNS)
