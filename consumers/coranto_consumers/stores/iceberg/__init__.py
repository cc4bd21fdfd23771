"""Tables of an Iceberg catalog as stores: rows, checkpoint and fence are one commit of the catalog."""

from coranto_consumers.stores.iceberg.rest import limit_questions
from coranto_consumers.stores.iceberg.shard_store import IcebergShardStore

__all__ = ["IcebergShardStore", "limit_questions"]
