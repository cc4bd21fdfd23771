"""Coranto: replicated, transactional, append-only journals."""

import contextlib
import os
from importlib.metadata import PackageNotFoundError, version

# gRPC reads these when it starts.
# Its handlers around fork() are for children that continue with gRPC. Ours exec another program (a JVM, a broker), or
# connect again, and the handlers can crash such a child before it gets there.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# Else gRPC writes each handshake that fails to standard error by itself, amid logs in JSON and what commands say.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
with contextlib.suppress(PackageNotFoundError):
    # Its event engine hands each message over between threads. Where one thread does all of that, as before, a small
    # message takes a third less processor time. Later versions may have no choice, and would complain of these names.
    if tuple(map(int, version("grpcio").split(".")[:2])) <= (1, 85):
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
