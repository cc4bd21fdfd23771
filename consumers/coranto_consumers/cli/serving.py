"""`coranto consumer serve module:App`. The options are the settings: `coranto_consumers.runtime.settings`."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Annotated, Any

import typer

from coranto.cli.connect import Endpoint, find_cluster
from coranto.client import JournalClient
from coranto.client.config import DEFAULT_RETRY_TIMEOUT
from coranto.member.command_line import run_member, show_settings, with_settings
from coranto.member.configuration import Configuration
from coranto_consumers.cli.loading import default_prefix, load_application
from coranto_consumers.runtime.process import run
from coranto_consumers.runtime.settings import ConsumerProcessSettings


def serve(
    configuration: Configuration[ConsumerProcessSettings],
    application: Annotated[str, typer.Argument(metavar="module:App")],
    endpoint: Endpoint = None,
) -> None:
    """Process the shards of an application until it is stopped.

    APPLICATION is `module:App`: a coranto_consumers.runtime.application.Application, or a class or function that
    returns one. Settings without an option come from the environment (CORANTO_CONSUMER_<NAME>), then from the file.
    Give keys of tokens in CORANTO_CONSUMER_AUTH_KEYS: process lists show options.
    """
    settings = configuration.settings

    def start() -> Coroutine[Any, Any, int]:
        chosen: dict[str, Any] = {"etcd_prefix": settings.etcd_prefix or default_prefix(application)}
        if not settings.etcd:
            from coranto.cluster import locate

            chosen["etcd"] = locate().etcd
        config = replace(find_cluster(endpoint), retry_timeout=DEFAULT_RETRY_TIMEOUT)
        made = load_application(application)

        async def work() -> int:
            return await run(settings.model_copy(update=chosen), made, JournalClient.of(config))

        return work()

    run_member(configuration, start)


serve_command = with_settings(ConsumerProcessSettings, serve)
settings_command = with_settings(ConsumerProcessSettings, show_settings)
