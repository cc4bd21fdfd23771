"""`coranto consumer serve module:App`. The options are the settings: `coranto_consumers.runtime.settings`."""

from __future__ import annotations

import asyncio
import inspect
import sys
from dataclasses import replace
from typing import Annotated, Any

import structlog
import typer
from pydantic import ValidationError

from coranto.cli.connect import Endpoint, find_cluster
from coranto.client import JournalClient
from coranto.client.config import DEFAULT_PATIENCE
from coranto.errors import CorantoError
from coranto.telemetry import configure_logging
from coranto_consumers.cli.loading import default_prefix, load_application
from coranto_consumers.runtime.process import run
from coranto_consumers.runtime.settings import SECRETS, ConsumerProcessSettings

app = typer.Typer(no_args_is_help=True, help="Run consumers.")


@app.callback()
def consumer() -> None:
    """Run consumers."""


def serve(application: str, endpoint: str | None, settings: ConsumerProcessSettings) -> None:
    """Process the shards of an application until told to stop.

    APPLICATION is `module:App`: a coranto_consumers.runtime.application.Application, or what makes one. What no option
    says comes from the environment (CORANTO_CONSUMER_<NAME>). Keys of tokens are no option, as others could see them:
    CORANTO_CONSUMER_AUTH_KEYS.
    """
    configure_logging(settings.log_level, json_lines=settings.log_json)
    try:
        chosen = {"etcd_prefix": settings.etcd_prefix or default_prefix(application)}
        if not settings.etcd:
            from coranto.cluster import locate

            chosen["etcd"] = locate().etcd
        config = replace(find_cluster(endpoint), patience=DEFAULT_PATIENCE)
        made = load_application(application)

        async def work() -> int:
            return await run(settings.model_copy(update=chosen), made, JournalClient.of(config))

        code = asyncio.run(work())
    except CorantoError as error:
        structlog.get_logger(__name__).error("consumer cannot run", error=str(error))
        code = 1
    sys.exit(code)


def _serve_command() -> Any:
    """Return the command `serve`, with an option for each setting that is not secret."""

    def command(application: str, endpoint: str | None, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            settings = ConsumerProcessSettings(**given)
        except ValidationError as error:
            problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False))
            raise typer.BadParameter(problems) from None
        serve(application, endpoint, settings)

    annotations: dict[str, Any] = {
        "application": Annotated[str, typer.Argument(metavar="module:App")],
        "endpoint": Endpoint,
    }
    for name, field in ConsumerProcessSettings.model_fields.items():
        if name not in SECRETS:
            flag = f"--{name.replace('_', '-')}"
            declaration = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
            option = typer.Option(declaration, help=field.description, show_default=False)
            annotations[name] = Annotated[field.annotation | None, option]  # type: ignore[operator]
    # Typer reads options from the signature, and their types from the annotations.
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name == "application" else None,
                annotation=annotation,
            )
            for name, annotation in annotations.items()
        ]
    )
    command.__doc__ = serve.__doc__
    return command


app.command("serve")(_serve_command())
