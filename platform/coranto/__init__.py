"""Coranto: replicated, transactional, append-only journals."""

import os

# gRPC's handlers around fork() are for children that go on with gRPC. Ours exec another program (a JVM, a broker), or
# connect anew, and the handlers can crash such a child before it gets there. gRPC reads this when it starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# Else gRPC writes each handshake that fails to standard error by itself, amid logs in JSON and what commands say.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
