"""`coranto types show|list|history`: prints registered message types."""

from __future__ import annotations

import datetime as dt
import json
from typing import Annotated, Final

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import Format, Output, note, print_table
from coranto.cli.types.registering import DEFAULT_REGISTRY, Registry
from coranto.client import JournalClient
from coranto.types.catalog import Catalog, TypeVersion
from coranto.types.compatibility import changes_between
from coranto.types.documents import format_type_document
from coranto.types.kinds import format_kind
from coranto.types.references import parse_reference
from coranto.types.registry import TypeRegistry

_MAX_STRAY_LINES: Final = 10
"""The maximum number of invalid lines of a registry that are reported one by one."""
_Output = Annotated[Output, typer.Option("--output", "-o", help="What to print.")]


def show(
    name: Annotated[
        str, typer.Argument(metavar="TYPE", help="Name of the type, perhaps with a version: shop.Order@3.")
    ],
    registry: Registry = DEFAULT_REGISTRY,
    output: Annotated[Format, typer.Option("--output", "-o", help="`yaml` is what `register` reads.")] = Format.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Show a message type: its latest version, or a certain one."""
    parse_reference(name, field="TYPE")
    found = with_client(endpoint, lambda client: TypeRegistry(client, registry).find(name))
    if output is Format.JSON:
        typer.echo(json.dumps(_as_json(found), indent=2))
        return
    if output is Format.YAML:
        typer.echo(format_type_document(found.definition), nl=False)
        return
    form = {key: value for key, value in found.definition.form.to_plain().items() if key != "descriptorSet"}
    typer.echo(f"{found}: {' '.join([found.definition.form.name, *(f'{key}={form[key]}' for key in form)])}")
    if found.definition.description:
        note(found.definition.description)
    rows = [
        (each.name, format_kind(each.kind), "" if each.nullable else "NOT NULL") for each in found.definition.fields
    ]
    print_table(("FIELD", "TYPE", ""), rows)


def list_types(
    registry: Registry = DEFAULT_REGISTRY, output: _Output = Output.TABLE, endpoint: Endpoint = None
) -> None:
    """List the latest versions of all message types."""
    catalog = _catalog(registry, endpoint)
    latest = [versions[-1] for name in catalog.names if (versions := catalog.history(name))]
    if output is Output.JSON:
        for each in latest:
            typer.echo(json.dumps(_as_json(each)))
        return
    rows = [
        (each.name, str(each.number), each.definition.form.name, str(len(each.definition.fields)), _time(each))
        for each in latest
    ]
    print_table(("TYPE", "VERSION", "FRAMING", "FIELDS", "REGISTERED"), rows)


def history(
    name: Annotated[str, typer.Argument(metavar="TYPE", help="Name of the type.")],
    registry: Registry = DEFAULT_REGISTRY,
    output: _Output = Output.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Show all versions of a message type, and what each of them changed."""
    versions = _catalog(registry, endpoint).history(name)
    if output is Output.JSON:
        for each in versions:
            typer.echo(json.dumps(_as_json(each)))
        return
    rows = []
    for at, each in enumerate(versions):
        changes = changes_between(versions[at - 1].definition, each.definition) if at else ("first version",)
        rows.append((str(each.number), _time(each), each.compatibility.value, "; ".join(changes)))
    print_table(("VERSION", "REGISTERED", "COMPATIBILITY", "CHANGES"), rows)


def _catalog(registry: str, endpoint: str | None) -> Catalog:
    """Return the catalog of a registry, and report its faults on standard error."""

    async def work(client: JournalClient) -> Catalog:
        return await TypeRegistry(client, registry).catalog()

    catalog = with_client(endpoint, work)
    shown = catalog.strays[:_MAX_STRAY_LINES]
    for stray in shown:
        note(f"registry {registry} at offset {stray.offset}: {stray.problem}; passed over")
    if more := catalog.stray_count - len(shown):
        note(f"registry {registry}: {more} more lines are no records; passed over")
    for each in catalog.names:
        if problem := catalog.problem_of(each):
            note(problem)
    return catalog


def _as_json(version: TypeVersion) -> dict[str, object]:
    return {
        "version": version.number,
        "compatibility": version.compatibility.value,
        "registered": _time(version),
        **version.definition.to_plain(),
    }


def _time(version: TypeVersion) -> str:
    try:
        return dt.datetime.fromtimestamp(version.time, dt.UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{version.time} s"
