"""`coranto streams autoscale`."""

from __future__ import annotations

import pytest

from coranto.cli.streams import autoscaling
from coranto.client import JournalClient
from coranto.errors import CorantoError
from coranto.streams.control.autoscale import Scaled
from coranto.streams.control.lifecycle import Streams
from coranto.streams.control.scaling import Merge, ScalingPolicy, Split
from coranto.testing.command_line import CommandLine
from tests.platform.cli.streams.conftest import create


def test_a_scaling_is_reported(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    create(run, "steady", "-s", "3")

    class FailsAfterDecision:
        """Makes the same decision at its first step, and fails at the next."""

        def __init__(self, client: JournalClient, names: list[str], *, policy: ScalingPolicy | None) -> None:
            assert (names, policy) == (["steady"], ScalingPolicy.by_bytes(5))
            self._streams = Streams(client)
            self._steps = 0

        async def step(self) -> list[Scaled]:
            self._steps += 1
            if self._steps > 1:
                raise CorantoError("the brokers are gone")
            changes = (Split(0, 2), Merge((1, 2)))
            return [Scaled(await self._streams.scale("steady", changes), changes)]

    monkeypatch.setattr(autoscaling, "Autoscaler", FailsAfterDecision)
    result = run("autoscale", "steady", "--policy", "bytes/5", "--interval", "0.01")
    assert result.output == "steady: split 0 into 2; merged 1 and 2; 3 segments are active now\n"
    assert (result.code, "the brokers are gone" in result.errors) == (1, True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("autoscale", "--policy", "x/1"), "is not a scaling policy"),
        (("autoscale", "--interval", "0"), "--interval: 0 seconds is not an interval"),
    ],
)
def test_contradictory_options_are_reported(run: CommandLine, words: tuple[str, ...], problem: str) -> None:
    result = run(*words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors
