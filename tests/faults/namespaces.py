"""Network namespaces: each broker has its own address, and the kernel drops packets between two of them.

Unlike a proxy's, such a cut can be in one direction, and neither side sees a closed connection. It needs root.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import shutil
from collections.abc import Sequence

from coranto.errors import ClusterError
from coranto.process.staged import StagedContext


class Namespaces(StagedContext):
    """A bridge, and a namespace behind it for each broker. Use as `async with`."""

    def __init__(self) -> None:
        super().__init__()
        self._name = f"cor{os.getpid()}"
        self._net = ipaddress.ip_network((0x0A000000 | random.SystemRandom().randrange(1 << 16) << 8, 24))
        self._addresses: dict[str, str] = {}
        self.gateway = str(self._net[1])
        """The address of this process."""

    async def _start(self) -> None:
        await _run("ip", "link", "add", self._name, "type", "bridge")
        self._exits.push_async_callback(_run, "ip", "link", "del", self._name)
        await _run("ip", "addr", "add", f"{self.gateway}/24", "dev", self._name)
        await _run("ip", "link", "set", self._name, "up")

    async def add(self, broker: str) -> str:
        """Return the address of a broker's namespace. The first call creates it."""
        if broker not in self._addresses:
            number = len(self._addresses) + 2
            address, name, wire = str(self._net[number]), self._namespace(broker), f"c{os.getpid()}v{number}"
            self._addresses[broker] = address  # Before the first wait, because brokers start concurrently.
            await _run("ip", "netns", "add", name)
            self._exits.push_async_callback(_run, "ip", "netns", "del", name)
            await _run("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", name)
            await _run("ip", "link", "set", wire, "master", self._name, "up")
            inside = ("ip", "-n", name)
            await _run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            await _run(*inside, "link", "set", "eth0", "up")
            await _run(*inside, "link", "set", "lo", "up")
        return self._addresses[broker]

    def command(self, broker: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a broker's `command` in its namespace, with the same process id."""
        ip = shutil.which("ip") or "/sbin/ip"
        # Only this machine can reach the namespaces.
        return [ip, "netns", "exec", self._namespace(broker), *command, "--serve-anyone-without-keys"]

    async def cut(self, source: str, target: str) -> None:
        """Drop all packets from a broker to another one. Answers to its connections are dropped with them."""
        await self._rules(target, "-A", "INPUT", "-s", self._addresses[source], "-j", "DROP")

    async def isolate(self, broker: str) -> None:
        """Drop all packets to and from a broker, including traffic of etcd, stores and clients."""
        await self._rules(broker, "-A", "INPUT", "-i", "eth0", "-j", "DROP")
        await self._rules(broker, "-A", "OUTPUT", "-o", "eth0", "-j", "DROP")

    async def dropped(self, broker: str) -> int:
        """Return the number of packets that a broker's rules have dropped."""
        listing = await self._rules(broker, "-L", "-v", "-x", "-n")
        return sum(int(line.split()[0]) for line in listing.splitlines() if " DROP " in line)

    async def heal(self) -> None:
        await asyncio.gather(*(self._rules(broker, "-F") for broker in self._addresses))

    def _namespace(self, broker: str) -> str:
        return f"{self._name}-{broker}"

    async def _rules(self, broker: str, *arguments: str) -> str:
        return await _run("ip", "netns", "exec", self._namespace(broker), "iptables", "-w", *arguments)


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed; are you root? {output.decode().strip()}")
    return output.decode()
