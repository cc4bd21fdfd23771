"""`coranto broker …` and `python -m coranto_broker …`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from pydantic import ValidationError

from coranto.errors import CorantoError
from coranto.telemetry import configure_logging
from coranto_broker.server import run
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool_files import Fsync

app = typer.Typer(no_args_is_help=True, help="Run a journal broker.")


@app.callback()
def broker() -> None:
    """Run a journal broker."""


@app.command()
def serve(
    etcd: Annotated[str | None, typer.Option(help="etcd endpoint, host:port.")] = None,
    etcd_prefix: Annotated[str | None, typer.Option(help="Where the cluster's keys live in etcd.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 chooses one.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Endpoint to tell others: http://host:port.")] = None,
    zone: Annotated[str | None, typer.Option(help="Failure zone of this broker.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="Name of this broker, unique in its zone.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder for spools; of one broker only.")] = None,
    file_root: Annotated[Path | None, typer.Option(help="Folder that file:/// stores are rooted at.")] = None,
    lease_seconds: Annotated[float | None, typer.Option(help="How long a dead broker goes unnoticed.")] = None,
    fsync: Annotated[Fsync | None, typer.Option(help="When spools are forced to the disk.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port for Prometheus; 0 is none.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain to serve with TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of --tls-cert.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Callers must show certificates of this CA.")] = None,
    peer_cert: Annotated[Path | None, typer.Option(help="Certificate to show to peers.")] = None,
    peer_key: Annotated[Path | None, typer.Option(help="Key of --peer-cert.")] = None,
    peer_ca: Annotated[Path | None, typer.Option(help="CA of peers' certificates.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json/--log-text", help="Log lines as JSON.")] = None,
) -> None:
    """Serve journals until told to stop. Other settings come from the environment: CORANTO_BROKER_<NAME>.

    Keys of tokens come only from there: CORANTO_BROKER_AUTH_KEYS.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    try:
        settings = BrokerSettings(**given)
        configure_logging(settings.log_level, json_lines=settings.log_json)
    except (ValidationError, CorantoError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        code = asyncio.run(run(settings))
    except CorantoError as error:
        structlog.get_logger(__name__).error("broker cannot run", error=str(error))
        code = 1
    sys.exit(code)
