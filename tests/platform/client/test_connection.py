"""Programs started by the process of a busy client: gRPC must not affect them between fork and exec."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal, subprocess, threading

from coranto.client import SyncJournalClient
from coranto.client.loop import LoopThread
from coranto.testing.fake_broker import FakeBroker

loop, fake = LoopThread("fake-broker"), FakeBroker()
loop.run(fake.__aenter__())
fake.create("a/journal")
client = SyncJournalClient(fake.endpoint)
stopped = threading.Event()

def work():
    while not stopped.is_set():
        client.append("a/journal", b"x" * 1000)

worker = threading.Thread(target=work)
worker.start()
# As Spark starts its JVM: with a function to run in the child, so that it is really forked.
codes = [subprocess.Popen(["true"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)).wait()
         for _ in range(100)]
stopped.set()
worker.join()
print(sum(code != 0 for code in codes), "of", len(codes), "died")
"""


def test_programs_started_by_a_process_with_a_busy_client_survive() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "0 of 100 died\n", done.stderr
