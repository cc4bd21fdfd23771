"""Coranto: replicated, transactional, append-only journals."""

import contextlib
import os
from importlib.metadata import PackageNotFoundError, version

# gRPC reads these when it starts.
# Its fork handlers are for children that continue to use gRPC. Our children exec another program (a JVM, a broker) or
# open new connections, and the handlers can crash them first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# By default gRPC writes each failed handshake to standard error, between JSON logs and the output of commands.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
with contextlib.suppress(PackageNotFoundError):
    # gRPC's event engine passes each message between threads. Without it, one thread does all the work, and a small
    # message takes a third less processor time. Later versions may lack these experiments and would warn about them.
    if tuple(map(int, version("grpcio").split(".")[:2])) <= (1, 85):
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
