"""Dagster's daemon, which looks after backfills each second. Half a minute, as otherwise, is most of a short test."""

from dagster._daemon import controller
from dagster._daemon.cli import main

if __name__ == "__main__":
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1
    main()
