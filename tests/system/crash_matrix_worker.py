"""Processes of the crash matrices. As a script, it imports everything once and forks for each line of input.

Each process runs one shard, and communicates with the test over a socket, one word per line. A process with a point
stops there, in its second transaction or during its takeover: it dies by SIGKILL, or pauses, as on a machine that
hangs, until the test resumes it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys

import crash_matrix_iceberg
import crash_matrix_logs
import crash_matrix_sql
from crash_matrix_control import Control

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the processes.
    for line in sys.stdin:
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            job = json.loads(line)
            kinds = {"log": crash_matrix_logs, "iceberg": crash_matrix_iceberg}
            store = next((kinds[kind] for kind in kinds if kind in job), crash_matrix_sql)
            asyncio.run(store.work(job, Control(job)))
            os._exit(0)


if __name__ == "__main__":
    main()
