"""The asset of an ingest: the stream that it writes. A run drains the source, or serves until it is stopped."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, Unpack

import dagster as dg
from pydantic import Field

from coranto.errors import CorantoError, InvalidInput
from coranto.ingest.blocking import run_ingest
from coranto.ingest.runs import IngestReport
from dagster_coranto.ingests.definition import IngestDefinition, IngestMode, IngestState
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.instance.pool_slot import PoolSlot
from dagster_coranto.instance.underway import CONSUMER_TAG
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import resource_of
from dagster_coranto.translation.documents import Definitions
from dagster_coranto.translation.options import AssetOptions, SpecOptions, op_options, spec_options, with_options
from dagster_coranto.translation.translator import DagsterJournalTranslator, JournalTranslatorData

_KINDS: Final = {"files": "file", "postgres": "postgresql"}
"""The asset kinds of sources, where they differ from the source's name."""
REPORT_SECONDS: Final = 30.0


class IngestRun(dg.Config):
    """The configuration of one run of an ingest."""

    mode: str = Field(
        default="",
        description="drain: until the source has no more rows. service: until terminated. Empty: as defined.",
    )
    for_seconds: float = Field(
        default=0, ge=0, description="End a service successfully after this many seconds; 0: never."
    )
    accept_loss: bool = Field(
        default=False, description="Continue even if brokers have lost part of the ingest's progress."
    )

    def mode_or(self, default: IngestMode) -> IngestMode:
        """Return the mode. Raises InvalidInput for an unknown mode."""
        try:
            return IngestMode(self.mode) if self.mode else default
        except ValueError:
            known = " or ".join(mode.value for mode in IngestMode)
            raise InvalidInput(f"{self.mode!r} is not a mode of an ingest; write {known}", field="mode") from None


@dataclass(frozen=True, slots=True)
class IngestStep:
    """One run of an ingest, for `IngestComponent.execute`. Use `run`, once."""

    definition: IngestDefinition
    context: dg.AssetExecutionContext
    config: IngestRun
    mode: IngestMode = IngestMode.DRAIN
    report_seconds: float = REPORT_SECONDS

    def run(self) -> Iterator[dg.MaterializeResult[None]]:
        """Ingest, and yield the result of the stream's asset.

        A terminated run commits the rows that it has read. Raises the errors of `Ingest.run`: for a row that cannot be
        an event, for a changed source, and in the mode DRAIN for brokers or a source that are unavailable for ten
        minutes.
        """
        context, name = self.context, self.definition.names.name
        mode = self.config.mode_or(self.mode)
        with PoolSlot(context.instance, context.run.run_id, f"coranto_ingest_{name}", context.log.info):
            journals = resource_of(context.resources, self.definition.resource_key, JournalResource)
            report = self._ingest(journals, follow=mode is IngestMode.SERVICE)
            state = self.definition.state(journals)
            yield dg.MaterializeResult(
                asset_key=self.definition.key,
                data_version=dg.DataVersion(state.version),
                metadata=self._metadata(state, report),
            )

    def _ingest(self, journals: JournalResource, *, follow: bool) -> IngestReport:
        """Run the ingest, and report its progress."""
        log = DagsterLog(self.context.log)
        end = monotonic() + self.config.for_seconds if follow and self.config.for_seconds else math.inf
        due, said = monotonic() + self.report_seconds, 0

        def show(report: IngestReport) -> None:
            nonlocal due, said
            if monotonic() < due or report.batches == said:
                return
            due, said = monotonic() + self.report_seconds, report.batches
            log.info("Ingesting", rows=report.rows, transactions=said)
            if follow:
                self._record_report(journals, report)

        return run_ingest(
            journals.client_config(),
            self.definition.spec(journals),
            follow=follow,
            accept_loss=self.config.accept_loss,
            on_progress=show,
            stop=lambda: monotonic() >= end,
        )

    def _record_report(self, journals: JournalResource, report: IngestReport) -> None:
        """Report a materialisation of a running service. Logs a warning instead if the state is unknown."""
        try:
            state = self.definition.state(journals)
        except CorantoError as error:
            self.context.log.warning(f"The position of {self.definition.names.name} is unknown: {error}")
            return
        tags = {"dagster/data_version": state.version}
        metadata = self._metadata(state, report)
        self.context.log_event(dg.AssetMaterialization(self.definition.key, metadata=metadata, tags=tags))

    @staticmethod
    def _metadata(state: IngestState, report: IngestReport) -> dict[str, Any]:
        return state.metadata(rows=report.rows, dead_letters=report.dead_letters, transactions=report.batches)


def build_ingest_asset(
    file: Path,
    *,
    resource_key: str = "journals",
    mode: IngestMode = IngestMode.DRAIN,
    report_seconds: float = REPORT_SECONDS,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    execute: Callable[[dg.AssetExecutionContext, IngestStep], Iterator[Any]] = lambda context, step: step.run(),
    **options: Unpack[AssetOptions],
) -> dg.AssetsDefinition:
    """Return the asset of the stream that an ingest writes. `file` is a file for `coranto ingest run`.

    Names are read from the file when this function is called. The rest, including variables such as
    `${KAFKA_PASSWORD}`, is read when the asset runs. Runs wait for each other in the pool `coranto_ingest_NAME`, with
    the name of the ingest. Each row is written once, even if runs fail. `execute` runs the step.

    Metadata: IngestMetadataSet. The data version is a digest of the positions in the source.
    """
    names = IngestDefinition.names_of(file)
    translator = dagster_journal_translator or DagsterJournalTranslator()
    added: SpecOptions = {
        **spec_options(options),
        "kinds": {_KINDS.get(names.kind, names.kind), *options.get("kinds", ())},
        "tags": {CONSUMER_TAG: names.name, **options.get("tags", {})},
    }
    spec = with_options(translator.get_asset_spec(JournalTranslatorData(names.stream)), added)
    definition = IngestDefinition(file, names, spec.key, resource_key)

    @dg.multi_asset(
        name=f"ingest_{names.name.replace('-', '_')}",
        specs=[spec],
        required_resource_keys={resource_key},
        **op_options(options),
    )
    def ingest(context: dg.AssetExecutionContext, config: IngestRun) -> Iterator[Any]:
        yield from execute(context, IngestStep(definition, context, config, mode, report_seconds))

    return INGESTS.add(ingest, definition)


INGESTS: Final = Definitions[IngestDefinition]("build_ingest_asset")
