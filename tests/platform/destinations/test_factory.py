"""dlt finds the destination by its name, and resolves its settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dlt
import pytest
from dlt.common.destination import Destination

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput
from tests.platform.destinations.conftest import Running
from tests.platform.destinations.shop import messages, pipeline


@pytest.mark.parametrize("name", ["coranto", "coranto.destinations.coranto"])
def test_the_destination_is_found_by_its_name(name: str) -> None:
    found = Destination.from_reference(name)
    assert found is not None
    assert (found.destination_name, found.destination_type) == ("coranto", "coranto.destinations.coranto")
    capabilities = found.capabilities()
    assert capabilities.supported_merge_strategies == ["upsert"]
    assert capabilities.preferred_loader_file_format == "jsonl"


@pytest.mark.integration
def test_arguments_replace_the_configuration(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coranto.destinations import coranto
    from coranto.testing.cluster import STORE_URL

    monkeypatch.setenv("DESTINATION__CORANTO__ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("DESTINATION__CORANTO__JOURNALS", "5")
    place = coranto(endpoint=client.config.endpoint, journals=2, prefix="eu/", stores=[STORE_URL])
    pipeline(tmp_path / "work", destination=place).run([{"id": 1}], table_name="orders")
    names = [info.spec.name for info in client.list("name:prefix=eu/shop_data/orders/").journals]
    assert names == ["eu/shop_data/orders/000", "eu/shop_data/orders/001"]
    assert not messages(client, "orders")


@pytest.mark.parametrize("journals", [0, 121])
def test_an_invalid_number_of_journals_is_refused(journals: int) -> None:
    from coranto.destinations import coranto

    factory = coranto(journals=journals)
    with pytest.raises(InvalidInput, match=f"{journals} is not a number of journals for each table"):
        factory.configuration(factory.spec()._bind_dataset_name("shop"))


def test_the_entry_point_imports_neither_dlt_nor_a_client() -> None:
    program = "import sys, coranto.destinations; print(sorted({'dlt', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_other_modules_do_not_load_dlt() -> None:
    assert dlt.__version__
    program = "import sys, coranto.ingest, coranto.cli; print('dlt' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
