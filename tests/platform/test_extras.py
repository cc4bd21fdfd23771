"""A missing extra is reported on use, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coranto.errors import CorantoError, MissingExtra
from coranto.extras import PARTS, require, with_install_advice

WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
try:
    {statement}
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("module", "extra", "statement"),
    [
        ("pyspark", "spark", "from coranto_consumers.spark import SparkConsumer"),
        ("pyspark", "spark", "import coranto_consumers.spark.consumer.spark_consumer"),
        ("pyspark", "spark", "from coranto_consumers.spark.session.sessions import new_session"),
        ("pyspark", "spark", "import pyspark_coranto"),
        ("sqlalchemy", "consumers", "from coranto_consumers.stores import SqlStore"),
        ("sqlalchemy", "consumers", "from coranto_consumers.stores import SqlShardStore"),
        ("sqlalchemy", "consumers", "from coranto_consumers.stores.sql import SqlStore"),
        ("sqlalchemy", "consumers", "from coranto_consumers.stores.merge import Add"),
        ("sqlalchemy", "consumers", "from coranto_consumers.runtime.columns import Columns"),
        ("pyiceberg", "lake", "from coranto_consumers.stores.iceberg.urls import IcebergHome"),
        ("pyspark", "spark", "from coranto_consumers.spark.consumer.windows import WindowConsumer"),
        ("sqlalchemy", "consumers", "from coranto_consumers.audit import ConsumerCheck"),
        (
            "sqlglot",
            "consumers",
            "from coranto_consumers.stores.sql_dialects import require_dialect as check; "
            "check('SELECT 1', 'sqlite', (), field='a')",
        ),
        ("pyarrow", "consumers", "from coranto.lake import scan"),
        ("pyarrow", "consumers", "from coranto.messages.batches import line_batch"),
        ("numpy", "consumers", "from coranto.messages.columnar_sequencer import ColumnarSequencer"),
        ("dagster_shared", "dagster", "import dagster_coranto"),
        ("dlt", "dlt", "from coranto.destinations import coranto"),
    ],
)
def test_an_import_names_the_extra(module: str, extra: str, statement: str) -> None:
    program = WITHOUT.format(module=module, statement=statement)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"MissingExtra {module}")
    assert f"is not installed; it comes with an extra: pip install 'coranto[{extra}]'" in said


def test_a_missing_module_of_an_extra_is_explained_and_others_are_not() -> None:
    found = with_install_advice(ModuleNotFoundError("No module named 'pyspark.sql'", name="pyspark.sql"))
    assert isinstance(found, MissingExtra)
    assert isinstance(found, CorantoError)
    assert (found.name, found.extra) == ("pyspark.sql", "spark")
    assert with_install_advice(found) is found
    other = ModuleNotFoundError("No module named 'shop'", name="shop")
    assert with_install_advice(other) is other
    assert with_install_advice(ModuleNotFoundError()).args == ()


def test_requiring_installed_parts_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("broker", "consumers", "spark"):
        require(extra, *PARTS[extra])
    with pytest.raises(MissingExtra, match=r"no_such_module is not installed.*coranto\[lake\]"):
        require("lake", "no_such_module")
