"""`python -m benchmarks [NAME …]`: run the named benchmarks, or all of them."""

from __future__ import annotations

import argparse

from benchmarks import allocator, append, messages, spark_source
from benchmarks.runner import report

BENCHMARKS = {
    "allocator": allocator.run,
    "append": append.run,
    "messages": messages.run,
    "spark_source": spark_source.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--rounds", type=int, default=5, help="counted pairs of each measure (default 5)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in arguments.names or BENCHMARKS:
        path = report(name, BENCHMARKS[name](arguments.rounds))
        print(f"wrote {path}\n")


if __name__ == "__main__":
    main()
