"""Tables of an Iceberg catalog as stores: rows, checkpoint and fence change in one commit of the catalog."""

from coranto.extras import with_install_advice

try:
    from coranto_consumers.stores.iceberg.rest import set_configuration_timeout
    from coranto_consumers.stores.iceberg.shard_store import IcebergShardStore
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

__all__ = ["IcebergShardStore", "set_configuration_timeout"]
