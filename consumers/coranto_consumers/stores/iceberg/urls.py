"""URLs of Iceberg stores: `iceberg://lake/shop.orders` is the home `shop.orders` in the catalog `lake`.

pyiceberg's own settings define `lake`: `.pyiceberg.yaml`, or variables such as `PYICEBERG_CATALOG__LAKE__URI`. So URLs
have no secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from coranto.errors import InvalidInput
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.iceberg.catalogs import FAILURES, failure
from coranto_consumers.stores.iceberg.rest import set_configuration_timeout, set_timeouts, set_token_timeout
from coranto_consumers.stores.iceberg.state import names_in, state_of
from coranto_consumers.stores.reading import ICEBERG


@dataclass(frozen=True, slots=True)
class IcebergHome:
    """A table with checkpoints, for reading them without raising a fence."""

    catalog: Catalog
    table: str

    @classmethod
    def at(cls, url: str) -> IcebergHome:
        """Parse a URL. Raises InvalidInput if it names no table, or a catalog that pyiceberg's settings lack."""
        catalog, slash, table = url.removeprefix(ICEBERG).partition("/")
        if not (url.startswith(ICEBERG) and catalog and slash and "." in table.strip(".")) or "/" in table:
            raise InvalidInput("is not like iceberg://CATALOG/namespace.table", field="store")
        set_token_timeout()
        set_configuration_timeout()
        try:
            found = load_catalog(catalog)
        except (ValueError, ImportError) as error:
            raise InvalidInput(
                f"pyiceberg's settings have no catalog {catalog!r} that can be used: {error}; describe it in "
                f".pyiceberg.yaml, or set PYICEBERG_CATALOG__{catalog.upper()}__URI",
                field="store",
            ) from error
        except FAILURES as error:
            raise failure(f"catalog {catalog} does not answer", error) from error
        set_timeouts(found)
        return cls(found, table)

    @property
    def name(self) -> str:
        return f"iceberg {self.catalog.name}/{self.table}"

    def load(self, name: str = "") -> Table:
        """Load a table, by default the home. Raises InvalidInput if it does not exist, and SqlStoreError."""
        try:
            return self.catalog.load_table(name or self.table)
        except NoSuchTableError:
            raise InvalidInput(f"there is no table {name or self.table}", field="store") from None
        except FAILURES as error:
            raise failure(f"store {self.name}", error) from error

    def read(self, shard: str) -> Restored | None:
        """Return a consumer's fence and checkpoint. None if it never started. Raises CorruptData for an invalid one."""
        table = self.load()
        if shard not in names_in(table):
            return None
        state = state_of(table, shard)
        return Restored(state.fence, state.checkpoint)

    def names(self, prefix: str) -> Sequence[str]:
        """Return the names of the shards with a checkpoint that start with `prefix`, sorted."""
        return sorted(name for name in names_in(self.load()) if name.startswith(prefix))
