"""The tables of a publication: their columns and keys, and checks that all changes can be read. All calls block."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from coranto.errors import InvalidInput, SourceChanged
from coranto.ingest.postgres.names import quoted, table_name
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.server import Connection, failures
from coranto.ingest.postgres.values import ColumnType, ColumnTypes

_MODIFIER: Final = re.compile(r"\([\d,-]+\)")
_TEXTS: Final = frozenset({"text", "character varying"})
_PUBLICATION: Final = (
    "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s"
)
_TABLES: Final = """
SELECT c.oid::int8, n.nspname, c.relname, COALESCE(r.oid, p.oid)::int8, l.files, l.files_now,
    c.relkind = 'p', to_jsonb(t) ->> 'rowfilter',
    to_jsonb(t) -> 'attnames', l.toast, l.full_rows AND c.relreplident = 'f', l.nothing,
    has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'), pg_table_size(c.oid)
FROM pg_publication p
JOIN pg_publication_tables t ON t.pubname = p.pubname
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
CROSS JOIN LATERAL (
    SELECT COALESCE(bool_or(reltoastrelid <> 0), false) toast,
        COALESCE(bool_and(relreplident = 'f'), true) full_rows,
        COALESCE(bool_or(relreplident = 'n'), false) nothing, COALESCE(sum(relfilenode::int8), 0)::int8 files,
        COALESCE(sum(pg_relation_filenode(oid)::int8), 0)::int8 files_now
    FROM pg_class WHERE oid = ANY (
        CASE WHEN c.relkind = 'p' THEN ARRAY (SELECT relid::oid FROM pg_partition_tree(c.oid) WHERE isleaf)
        ELSE ARRAY[c.oid] END)) l
WHERE p.pubname = %s ORDER BY n.nspname, c.relname
"""
_COLUMNS: Final = """
SELECT attrelid::int8, attnum, attname, atttypid::int8, atttypmod, format_type(atttypid, atttypmod), atthasmissing
FROM pg_attribute WHERE attrelid = ANY (%s::oid[]) AND attnum > 0 AND NOT attisdropped
    AND (attgenerated = '' OR current_setting('server_version_num')::int >= 180000) ORDER BY attrelid, attnum
"""
_KEYS: Final = """
SELECT i.indrelid::int8, array_agg(a.attname::text ORDER BY k.place)
FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
WHERE i.indrelid = ANY (%s::oid[]) AND k.place <= i.indnkeyatts
    AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END
GROUP BY i.indrelid
"""
_TYPES: Final = """
WITH RECURSIVE chain AS (
    SELECT oid AS number, oid, typtype, typbasetype, typtypmod, typelem, typcategory
    FROM pg_type WHERE oid = ANY (%s::oid[])
    UNION ALL
    SELECT c.number, t.oid, t.typtype, t.typbasetype, CASE WHEN c.typtypmod < 0 THEN t.typtypmod ELSE c.typtypmod END,
        t.typelem, t.typcategory
    FROM chain c JOIN pg_type t ON c.typtype = 'd' AND t.oid = c.typbasetype)
SELECT number::int8, oid::int8, typtypmod, CASE WHEN typcategory = 'A' THEN typelem::int8 ELSE 0 END
FROM chain WHERE typtype <> 'd'
"""
_KEYS_KEPT: Final = 4


class TableColumn(NamedTuple):
    """A column. A rename keeps `number`. `has_missing` is true if older rows got a value when the column was added."""

    number: int
    name: str
    type: int
    modifier: int
    shown: str
    has_missing: bool


class Table(NamedTuple):
    """A table of a publication."""

    oid: int
    schema: str
    table: str
    member: int
    """The OID of its entry in the publication. It changes if the table is removed and added again."""
    files: int
    """The number of its file (`relfilenode`), or the sum for its partitions. It changes if the table is rewritten."""
    files_now: int
    """The current value of `files`, even if the transaction reads an earlier snapshot."""
    is_partitioned: bool
    row_filter: str
    key: tuple[str, ...]
    columns: tuple[TableColumn, ...]
    size: int

    @property
    def name(self) -> str:
        """The table's name in splits and events."""
        return table_name(self.schema, self.table)

    @property
    def sql(self) -> str:
        """The table's name in a statement."""
        return quoted(self.schema, self.table)


def tables_of(
    connection: Connection, options: PostgresOptions, role: str, known: Mapping[str, Any]
) -> dict[str, Table]:
    """Return the tables of the publication by their names.

    Raises InvalidInput for tables whose changes cannot be read, with the statement that fixes it, and SourceChanged if
    a table of the `known` positions was recreated, or removed from the publication and added again.
    """
    with failures():
        publication = connection.execute(_PUBLICATION, [options.publication]).fetchone()
        rows = connection.execute(_TABLES, [options.publication]).fetchall()
        numbers = [row[0] for row in rows]
        columns = _grouped(connection.execute(_COLUMNS, [numbers]).fetchall())
        keys: dict[int, list[str]] = dict(connection.execute(_KEYS, [numbers]).fetchall())
    name = quoted(options.publication)
    if publication is None:
        raise InvalidInput(
            f"there is no publication {options.publication}: run CREATE PUBLICATION {name} FOR TABLE …, with the "
            "tables to read",
            field="publication",
        )
    if not publication[0]:
        raise InvalidInput(
            f"the publication {options.publication} leaves changes out: run ALTER PUBLICATION {name} SET (publish = "
            "'insert, update, delete, truncate')",
            field="publication",
        )
    if not rows:
        raise InvalidInput(
            f"the publication {options.publication} has no tables: run ALTER PUBLICATION {name} ADD TABLE …",
            field="publication",
        )
    found = {}
    for oid, schema, relation, member, files, files_now, is_partitioned, row_filter, names, *judged, size in rows:
        table = Table(
            *(oid, schema, relation, member, files, files_now, is_partitioned, row_filter or ""),
            tuple(keys.get(oid, ())),
            tuple(each for each in columns.get(oid, ()) if names is None or each.name in names),
            size,
        )
        _require(table, options, role, *judged)
        position = known.get(table.name)
        if position is not None and (position["oid"], position["member"]) != (oid, member):
            raise SourceChanged(
                f"table {table.name} was created again, or taken out of the publication {options.publication} and "
                "added again. Changes between are not in the stream: drop the ingest's replication slot, and give the "
                "ingest another name and another stream"
            )
        found[table.name] = table
    return found


def _grouped(rows: Sequence[tuple[Any, ...]]) -> dict[int, list[TableColumn]]:
    found: dict[int, list[TableColumn]] = {}
    for oid, *column in rows:
        found.setdefault(oid, []).append(TableColumn(*column))
    return found


def _require(
    table: Table, options: PostgresOptions, role: str, has_toast: bool, is_full: bool, has_none: bool, is_readable: bool
) -> None:
    """Raise InvalidInput for a table whose rows or changes cannot be read completely."""
    if not is_readable:
        raise InvalidInput(
            f"the role {role} may not read table {table.name}: run GRANT USAGE ON SCHEMA {quoted(table.schema)} TO "
            f"{quoted(role)} and GRANT SELECT ON {table.sql} TO {quoted(role)}"
        )
    if not table.key:
        raise InvalidInput(
            f"table {table.name} has no primary key, which events need: run ALTER TABLE "
            f"{table.sql} ADD PRIMARY KEY (…), or ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX … with a unique "
            "index of columns that are not null"
        )
    if lacking := [each for each in table.key if each not in {column.name for column in table.columns}]:
        raise InvalidInput(
            f"the publication leaves {', '.join(lacking)} of the key of table {table.name} out: run ALTER PUBLICATION "
            f"{quoted(options.publication)} SET TABLE {table.sql} (…), with these columns, and all of its other tables"
        )
    if has_none:
        raise InvalidInput(
            f"table {table.name} has the replica identity NOTHING, so that updates and deletes have no key: run ALTER "
            f"TABLE {table.sql} REPLICA IDENTITY FULL"
        )
    if has_toast and not is_full and not options.omits_toast:
        parts = ", and the same for its partitions" if table.is_partitioned else ""
        raise InvalidInput(
            f"the database does not give large values of table {table.name} that an update leaves as they are: run "
            f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL{parts}. "
            "With `toast: omit`, events lack them"
        )
    if options.operation and options.operation in {column.name for column in table.columns}:
        raise InvalidInput(
            f"table {table.name} has a column {options.operation!r}: choose another name", field="operation"
        )


def load_types(connection: Connection, types: ColumnTypes, numbers: Sequence[int]) -> None:
    """Look up unknown types in the database."""
    wanted = types.unknown(numbers)
    while wanted:
        with failures():
            rows = connection.execute(_TYPES, [wanted]).fetchall()
        for number in wanted:
            types.add(number, ColumnType(number))
        for number, base, modifier, element in rows:
            types.add(number, ColumnType(base, modifier, element))
        wanted = types.unknown(row[3] for row in rows if row[3])


def position_of(table: Table, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the position of a table before its first row.

    `files` and `columns` are compared later to detect changes of the schema. `keys` has the columns of the current key
    and of the keys at the `known` position, because the log may have both.
    """
    columns = {str(each.number): [each.name, each.shown] for each in table.columns}
    keys = [list(table.key), *(each for each in (known or {}).get("keys", ()) if each != list(table.key))]
    facts = {"oid": table.oid, "member": table.member, "files": table.files, "keys": keys[:_KEYS_KEPT]}
    return {"done": False, **facts, "columns": columns}


def must_be_read_again(table: Table, position: Mapping[str, Any]) -> bool:
    """Return True if rows of a table have changed without a change in the log.

    Columns that are added with a value, renamed, or changed in type have this effect.
    """
    is_rewritten = table.files != position["files"]
    for each in table.columns:
        known = position["columns"].get(str(each.number))
        if known is None:
            if each.has_missing or is_rewritten:
                return True
        elif known[0] != each.name or (
            known[1] != each.shown and (is_rewritten or _has_other_text(known[1], each.shown))
        ):
            return True
    return False


def _has_other_text(before: str, after: str) -> bool:
    """Return True if values can have another text in a new type, although the table was not rewritten."""
    kinds = {_MODIFIER.sub("", each) for each in (before, after)}
    return len(kinds) > 1 and not kinds <= _TEXTS
