"""Dagster's daemon with backfills processed each second instead of each half minute, for short tests."""

from dagster._daemon import controller
from dagster._daemon.cli import main

if __name__ == "__main__":
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1
    main()
