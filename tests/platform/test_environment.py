"""The settings of gRPC that Coranto chooses for its processes."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import asyncio, os
import coranto
import grpc

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(None)

asyncio.run(main())
print(os.environ["GRPC_EXPERIMENTS"])
"""


def run(**settings: str) -> tuple[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**base, **settings}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr.strip()


def test_grpc_accepts_the_chosen_settings_and_connects_with_them() -> None:
    assert run() == ("-event_engine_client,-event_engine_listener", "")


def test_settings_of_the_user_are_kept() -> None:
    assert run(GRPC_EXPERIMENTS="event_engine_client") == ("event_engine_client", "")
