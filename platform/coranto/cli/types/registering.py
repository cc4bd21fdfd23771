"""`coranto types register|check`: registers message types, or checks that they can be registered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import note, opened
from coranto.client import JournalClient
from coranto.errors import IncompatibleType, InvalidInput
from coranto.types.catalog import Catalog, TypeVersion
from coranto.types.compatibility import Compatibility
from coranto.types.definitions import MessageType
from coranto.types.documents import parse_type_document
from coranto.types.registry import TypeRegistry

DEFAULT_REGISTRY = "types/registry"

Registry = Annotated[
    str, typer.Option("--registry", envvar="CORANTO_TYPE_REGISTRY", help="Journal that registers the types.")
]
_Files = Annotated[
    list[str],
    typer.Option("--file", "-f", help="YAML file with the definition of a type, or - for input. May be repeated."),
]
_CompatibilityOption = Annotated[
    Compatibility | None,
    typer.Option(
        "--compatibility",
        case_sensitive=False,
        help="Compatibility: BACKWARD (new versions read messages of earlier ones), FORWARD, FULL, NONE. Default: "
        "as the last version, BACKWARD for the first.",
        show_default=False,
    ),
]


def register(
    files: _Files,
    registry: Registry = DEFAULT_REGISTRY,
    compatibility: _CompatibilityOption = None,
    like: Annotated[
        str,
        typer.Option("--like", help="Create the registry if it is missing, with the settings of this journal."),
    ] = "",
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue although the registry may have lost versions.")
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Register message types: each definition is the next version of its type, unless it has been registered before.

    A version that would break readers is refused, with each field that breaks them.
    """
    definitions = [_read(name) for name in files]

    async def work(client: JournalClient) -> None:
        types = TypeRegistry(client, registry)
        for definition in definitions:
            done = await types.register(definition, compatibility=compatibility, like=like, accept_loss=accept_loss)
            typer.echo(f"registered {done.version}" if done.is_new else _unchanged(await types.catalog(), done.version))

    with_client(endpoint, work)


def check(
    files: _Files,
    registry: Registry = DEFAULT_REGISTRY,
    compatibility: _CompatibilityOption = None,
    endpoint: Endpoint = None,
) -> None:
    """Check definitions as `register` does, and change nothing. The exit code is 1 if it would refuse one of them."""
    definitions = [_read(name) for name in files]

    async def work(client: JournalClient) -> bool:
        catalog = await TypeRegistry(client, registry).catalog()
        sound = True
        for definition in definitions:
            try:
                following = catalog.next_version(definition, compatibility, 0.0)
            except IncompatibleType as error:
                sound = False
                for problem in error.problems:
                    note(f"{definition.name}: {problem}")
                continue
            if following is None:
                known = catalog.version_of(definition)
                assert known is not None
                typer.echo(_unchanged(catalog, known))
            else:
                typer.echo(f"would register {following}")
                catalog.feed(following.to_line())  # Later definitions of this type follow it.
        return sound

    if not with_client(endpoint, work):
        raise typer.Exit(1)


def _unchanged(catalog: Catalog, version: TypeVersion) -> str:
    latest = catalog.history(version.name)[-1]
    return f"unchanged: {version}" + (f" (the latest is {latest})" if latest != version else "")


def _read(name: str) -> MessageType:
    with opened(name, "rb") as file:
        content = file.read()
    try:
        return parse_type_document(content.decode(), Path() if name == "-" else Path(name).parent)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"is not UTF-8: {error}", field=name) from error
    except InvalidInput as error:
        raise error.within(name) from error
