"""`coranto consumer compare`: compare the tables of two consumers of the same input."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from coranto.cli.output import Output, print_table
from coranto_consumers.cli.arguments import Store
from coranto_consumers.comparison import TableComparison, compare_tables, table_at

DIFFERENT: Final = 1
"""The exit code of a comparison of tables that are not equal."""


def compare(
    left: Annotated[str, typer.Argument(metavar="LEFT", help="A table, or schema.table.", show_default=False)],
    right: Annotated[str, typer.Argument(metavar="RIGHT", help="The table to compare with it.", show_default=False)],
    store: Store,
    key: Annotated[
        list[str], typer.Option("--key", "-k", help="Column of the key. Repeat it for several.", show_default=False)
    ],
    right_store: Annotated[
        str,
        typer.Option(
            "--right-store",
            envvar="CORANTO_RIGHT_STORE_URL",
            help="URL of RIGHT's store. Default: the same.",
            show_default=False,
        ),
    ] = "",
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="Column to leave out. May be repeated.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Maximum difference of floats, relative or absolute.")
    ] = 0.0,
    examples: Annotated[
        int, typer.Option("--examples", min=0, help="Maximum number of examples of each difference.")
    ] = 10,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
) -> None:
    """Compare two tables by key: rows, sums of columns, keys in only one table, and values that differ.

    The exit code is 0 if the tables are equal and not empty. It is 1 otherwise, or if a table could not be read
    completely.
    """
    found = compare_tables(
        table_at(store, left),
        table_at(right_store or store, right),
        key,
        ignore=ignore or (),
        tolerance=tolerance,
        examples=examples,
    )
    if output is Output.JSON:
        typer.echo(found.to_json())
    else:
        _print(found)
    if not found.is_equal:
        sys.exit(DIFFERENT)


def _print(found: TableComparison) -> None:
    print_table(["", found.merged.left.name, found.merged.right.name], found.rows())
    if rows := found.examples():
        typer.echo("")
        print_table([", ".join(found.keys), "COLUMN", found.merged.left.name, found.merged.right.name], rows)
    typer.echo("")
    if found.is_equal:
        compared = len(found.keys) + len(found.columns)
        typer.echo(f"equal: {found.merged.in_both:,} rows, in {compared} columns")
    for each in found.differences():
        typer.echo(f"different: {each}")
