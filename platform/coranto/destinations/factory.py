"""The destination `coranto`: its settings and its capabilities."""

import dataclasses
from typing import Any, Final, Optional

from dlt.common.configuration import configspec
from dlt.common.destination import Destination, DestinationCapabilitiesContext
from dlt.common.destination.client import DestinationClientDwhConfiguration

from coranto.client import ClientConfig
from coranto.cluster import resolve_client_config
from coranto.destinations.client import CorantoClient
from coranto.destinations.columns import DEFAULT_DECIMAL
from coranto.errors import InvalidInput

_MAX_NAME: Final = 128
_REPLACE: Final = ("refuse", "append")
DEFAULT_REGISTRY: Final = "types/registry"


@configspec
class CorantoClientConfiguration(DestinationClientDwhConfiguration):
    """The settings below `destination.coranto` in dlt's configuration. See docs/dlt.md."""

    destination_type: Final[str] = dataclasses.field(default="coranto", init=False, repr=False, compare=False)
    # dlt reads these annotations, and supports Optional, but not `str | None`.
    endpoint: Optional[str] = None  # noqa: UP045
    prefix: Optional[str] = None  # noqa: UP045
    journals: int = 1
    replication: int = 1
    stores: list[str] = dataclasses.field(default_factory=lambda: ["file:///"])
    registry: str = DEFAULT_REGISTRY
    replace: str = _REPLACE[0]
    accept_loss: bool = False

    def on_resolved(self) -> None:
        if self.replace not in _REPLACE:
            raise InvalidInput(f"{self.replace!r} is not a value of replace; give {' or '.join(_REPLACE)}")
        if not 1 <= self.journals <= 120:
            raise InvalidInput(f"{self.journals} is not a number of journals for each table; give 1 to 120")

    def client_config(self) -> ClientConfig:
        """Return the configuration of clients. Raises ClusterError if there is no endpoint or cluster."""
        return resolve_client_config(self.endpoint or "")

    def root_of(self, dataset: str) -> str:
        """Return the folder of a dataset's journals."""
        return f"{self.prefix.strip('/')}/{dataset}" if self.prefix else dataset

    def __str__(self) -> str:
        return self.endpoint or "the cluster of the environment"


class coranto(Destination[CorantoClientConfiguration, CorantoClient]):
    """The factory of the destination, as dlt expects it. Arguments replace settings of the configuration."""

    spec = CorantoClientConfiguration
    client_class = CorantoClient

    def __init__(
        self,
        endpoint: str | None = None,
        prefix: str | None = None,
        journals: int = 1,
        replication: int = 1,
        stores: list[str] | None = None,
        registry: str = DEFAULT_REGISTRY,
        replace: str = _REPLACE[0],
        accept_loss: bool = False,
        destination_name: str | None = None,
        environment: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            endpoint=endpoint,
            prefix=prefix,
            journals=journals,
            replication=replication,
            stores=stores,
            registry=registry,
            replace=replace,
            accept_loss=accept_loss,
            destination_name=destination_name,
            environment=environment,
            **kwargs,
        )

    @property
    def destination_type(self) -> str:
        """The name that dlt keeps in the state of a pipeline, and imports later."""
        return "coranto.destinations.coranto"

    def _raw_capabilities(self) -> DestinationCapabilitiesContext:
        caps = DestinationCapabilitiesContext.generic_capabilities("jsonl", supported_merge_strategies=["upsert"])
        caps.supported_loader_file_formats = ["jsonl", "parquet"]
        caps.decimal_precision = DEFAULT_DECIMAL
        caps.max_identifier_length = caps.max_column_identifier_length = _MAX_NAME
        caps.supports_transactions = caps.supports_ddl_transactions = False
        caps.supported_replace_strategies = ["truncate-and-insert"]
        # The files of a table are loaded sequentially, so rows of a key keep the order of the load's files.
        caps.loader_parallelism_strategy = "table-sequential"
        return caps
