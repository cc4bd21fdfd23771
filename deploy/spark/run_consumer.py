"""Run a consumer with `spark-submit`, with the arguments of `coranto consumer run`.

spark-submit --master yarn run_consumer.py shop:Orders --store postgresql://...
"""

import sys

from coranto.cli import main

if __name__ == "__main__":
    sys.exit(main(["consumer", "run", *sys.argv[1:]]))
