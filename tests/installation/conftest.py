"""Tests in subfolders take minutes: they make environments, images and clusters as users do.

`make test-install` runs the folder `elsewhere`, and `make images` the folder `images`. These commands fail if they
collect no test, so no test can be omitted by mistake.
"""

import os

collect_ignore = [
    folder
    for folder, variable in (("elsewhere", "CORANTO_TEST_INSTALL"), ("images", "CORANTO_TEST_IMAGES"))
    if not os.environ.get(variable)
]
