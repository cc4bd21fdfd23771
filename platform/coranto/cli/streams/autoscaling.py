"""`coranto streams autoscale`: splits and merges segments according to streams' policies."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.numbers import with_numbers
from coranto.cli.output import note
from coranto.cli.streams.managing import policy_of
from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.streams.control.autoscale import DEFAULT_INTERVAL, Autoscaler
from coranto.streams.control.scaling import Change, RateWindows, Split


@with_numbers(**{name: f"{seconds / 60:g}" for name, seconds in asdict(RateWindows()).items()})
def autoscale(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[STREAM]...", help="Default: all that have a policy.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option("--policy", help="Instead of the streams' policies (see `create --scale`).", show_default=False),
    ] = "",
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two checks.")] = DEFAULT_INTERVAL,
    endpoint: Endpoint = None,
) -> None:
    """Measure the load of segments, and split and merge them accordingly, until Ctrl-C.

    A segment is split when its load was more than 5, 2 or 1 times the policy's rate for {short}, {middle} or {long}
    minutes. It is merged with its neighbour when both were well below that rate for {idle} minutes. Nothing is changed
    in the first {cool_down} minutes.
    """
    if not interval > 0:
        raise InvalidInput(f"{interval:g} seconds is not an interval; give more than 0", field="--interval")
    given = policy_of(policy, "--policy")

    async def work(client: JournalClient) -> None:
        scaler = Autoscaler(client, names or (), policy=given)
        note(f"measuring every {interval:g} s")
        while True:
            for scaled in await scaler.step():
                description = "; ".join(map(_change_text, scaled.changes))
                typer.echo(
                    f"{scaled.stream.name}: {description}; {len(scaled.stream.active())} segments are active now"
                )
            await asyncio.sleep(interval)

    with_client(endpoint, work)


def _change_text(change: Change) -> str:
    if isinstance(change, Split):
        return f"split {change.segment} into {change.into}"
    return f"merged {' and '.join(map(str, change.segments))}"
