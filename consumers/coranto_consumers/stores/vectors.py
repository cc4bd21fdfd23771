"""Offset vectors that are too long for metadata, stored in the SQL store by their digests.

Each consumer's newest vectors are kept, up to a number of bytes. Older vectors are deleted when new ones are stored.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Column, Connection, Double, Integer, LargeBinary, MetaData, String, Table, delete, func, select
from sqlalchemy import insert as insert_into
from sqlalchemy import update as update_of
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from coranto.client.positions import vector_digest
from coranto.errors import CorruptData, InvalidInput
from coranto.offsets import vector_of_json, vector_to_json
from coranto_consumers.stores.mysql import NAME
from coranto_consumers.stores.sql import SqlStore

VECTORS = Table(
    "coranto_vectors",
    MetaData(),
    Column("version", String(64), primary_key=True),
    Column("consumer", NAME, primary_key=True),
    Column("kept", Double, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("vector", LargeBinary, nullable=False),
)

MAX_VECTOR_BYTES: Final = 64 << 20
"""The maximum bytes of a consumer's compressed vectors. The newest vectors are kept."""


@dataclass(frozen=True, slots=True)
class OffsetVector:
    """Offsets of journals after a read (`ends`) and before it (`begins`, 0 for a journal that is absent)."""

    ends: Mapping[str, int]
    begins: Mapping[str, int] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The digest of the vector: equal for equal offsets."""
        return vector_digest({**{f"{journal}@": at for journal, at in self.begins.items()}, **self.ends})


class VectorLog:
    """The vectors in one store. Creates the table if absent."""

    def __init__(
        self, store: SqlStore, *, max_bytes: int = MAX_VECTOR_BYTES, wall: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._wall = wall
        store.create_tables(VECTORS)

    def save(self, consumer: str, vector: OffsetVector) -> None:
        """Store a vector of a consumer, and delete its oldest vectors beyond the limit. Raises SqlStoreError."""
        packed = zlib.compress(
            json.dumps([vector_to_json(vector.ends), vector_to_json(vector.begins)], separators=(",", ":")).encode()
        )
        row = {"consumer": consumer, "version": vector.version, "bytes": len(packed), "vector": packed}
        try:
            try:
                with self._store.engine.begin() as connection:
                    if not self._renew(connection, consumer, vector.version):
                        connection.execute(insert_into(VECTORS).values(**row, kept=self._wall()))
            except IntegrityError:
                return  # Another process has just kept the same vector.
            with self._store.engine.begin() as connection:
                self._delete_old(connection, consumer, vector.version)
        except SQLAlchemyError as error:
            raise self._store.failure(f"the offsets of {consumer} could not be kept", error) from error

    def find(self, version: str) -> OffsetVector | None:
        """Return the vector with a digest. None if it was never stored, or was deleted.

        Raises SqlStoreError, and CorruptData if the vector does not have this digest.
        """
        query = select(VECTORS.c.vector).where(VECTORS.c.version == version).limit(1)
        try:
            with self._store.engine.connect() as connection:
                packed = connection.execute(query).scalar_one_or_none()
        except SQLAlchemyError as error:
            raise self._store.failure("kept offsets could not be read", error) from error
        if packed is None:
            return None
        try:
            ends, begins = json.loads(zlib.decompress(bytes(packed)))
            found = OffsetVector(vector_of_json(ends, version), vector_of_json(begins, version))
        except (InvalidInput, ValueError, TypeError, zlib.error) as error:
            raise CorruptData(f"the offsets {version} in {self._store.name} cannot be read: {error}") from error
        if found.version != version:
            raise CorruptData(f"the offsets {version} in {self._store.name} were changed: they are {found.version}")
        return found

    def _renew(self, connection: Connection, consumer: str, version: str) -> bool:
        is_row = (VECTORS.c.version == version, VECTORS.c.consumer == consumer)
        return bool(connection.execute(update_of(VECTORS).where(*is_row).values(kept=self._wall())).rowcount)

    def _delete_old(self, connection: Connection, consumer: str, newest: str) -> None:
        of_consumer = VECTORS.c.consumer == consumer
        total = connection.execute(select(func.sum(VECTORS.c.bytes)).where(of_consumer)).scalar_one() or 0
        if total <= self._max_bytes:
            return
        query = select(VECTORS.c.version, VECTORS.c.bytes).where(of_consumer, VECTORS.c.version != newest)
        gone: list[str] = []
        for row in connection.execute(query.order_by(VECTORS.c.kept)):
            if total <= self._max_bytes:
                break
            total -= row.bytes
            gone.append(row.version)
        if gone:
            connection.execute(delete(VECTORS).where(of_consumer, VECTORS.c.version.in_(gone)))
