"""Commits through a REST catalog: no response loses or duplicates rows, or loses a table's file."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import requests
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import BadRequestError, CommitFailedException, ServerError, ServiceUnavailableError
from pyiceberg.table.metadata import TableMetadataUtil
from sqlalchemy.exc import OperationalError as DisconnectedDatabase

from coranto.errors import CommitOutcomeUnknown, Fenced, InvalidInput, SqlStoreError
from coranto_consumers.stores.contract import SHARD, StoreContract, StoreSubject, checkpoint
from coranto_consumers.stores.iceberg import IcebergShardStore, rest, set_configuration_timeout
from coranto_consumers.stores.iceberg.catalogs import failure
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.rest import CommitOutcome, is_transient, outcome_of
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.iceberg.writing import FileWriter
from tests.consumers.stores.iceberg.rest_server import Answer, CutOff, RestServer, lost, rest_server, status_only
from tests.consumers.stores.iceberg.test_owner import ONE, ROWS, TWO, commit, write
from tests.consumers.stores.iceberg.test_shard_store import SCHEMA, TABLE

Carry = Callable[[], Answer]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestServer]:
    with rest_server(tmp_path) as server:
        yield server


@pytest.fixture
def tables(server: RestServer) -> RestCatalog:
    catalog = server.catalog()
    catalog.create_namespace("shop")
    for name in (ONE, TWO):
        catalog.create_table(name, ROWS.schema)
    return catalog


def owner_of(server: RestServer) -> IcebergOwner:
    owner = IcebergOwner(server.catalog(), ONE, sleep=lambda seconds: None)
    owner.raise_fence(SHARD)
    owner.sweep()
    return owner


def rows(catalog: RestCatalog) -> list[int]:
    """Return the rows, which reads all files of the table."""
    found: list[int] = catalog.load_table(ONE).scan().to_arrow().column("n").to_pylist()
    return found


class TestIcebergShardStoreOnRest(StoreContract):
    @pytest.fixture
    def subject(self, server: RestServer) -> StoreSubject:
        class Subject(StoreSubject):
            async def open(self) -> IcebergShardStore:
                return IcebergShardStore(server.catalog(), TABLE, SCHEMA)

            async def add(self, store: IcebergShardStore, number: int) -> None:
                store.append([{"n": number}])

            async def numbers(self, store: IcebergShardStore) -> list[int]:
                return (await store.rows()).column("n").to_pylist()

        return Subject()


def made_and_502(carry_out: Carry) -> Answer:
    carry_out()
    return status_only(502)


def made_and_500(carry_out: Carry) -> Answer:
    carry_out()
    return status_only(500)


def only_503(carry_out: Carry) -> Answer:
    return status_only(503)


def cut(carry_out: Carry) -> Answer:
    raise CutOff


def refused(carry_out: Carry) -> Answer:
    return status_only(409)


def sent_again(carry_out: Carry) -> Answer:
    """Repeat a request like a proxy that lost the response, and return the second response: 409."""
    carry_out()
    status, document = carry_out()
    assert status == 409
    return status, document


@pytest.mark.parametrize("fault", [lost, made_and_502, made_and_500, only_503, cut, refused])
def test_an_unknown_outcome_is_resolved(fault, server: RestServer, tables: RestCatalog) -> None:
    owner = owner_of(server)
    commit(owner, 100, ONE)
    change, number = write(owner, ONE), owner.next_number
    server.faults.append(fault)
    with pytest.raises(CommitOutcomeUnknown) as unknown:
        owner.commit(checkpoint(200), {ONE: change}, number)
    applied = fault in (lost, made_and_502, made_and_500)
    if applied:
        owner.resolve(number, unknown.value)
    else:
        with pytest.raises(SqlStoreError, match="was not applied"):
            owner.resolve(number, unknown.value)
    assert rows(tables) == [1, 2] * (2 if applied else 1)
    commit(owner, 300, ONE)
    assert rows(tables) == [1, 2] * (3 if applied else 2)
    assert owner_of(server).state.checkpoint == checkpoint(300)


def test_a_refused_repetition_of_an_applied_commit_counts_as_applied(server: RestServer, tables: RestCatalog) -> None:
    owner = owner_of(server)
    server.faults.append(sent_again)
    commit(owner, 100, ONE)
    assert rows(tables) == [1, 2]
    server.faults.append(sent_again)
    new = owner_of(server)  # Such a commit raises its fence.
    assert (new.state.checkpoint, new.state.fence) == (checkpoint(100), 2)


def test_pyicebergs_own_commit_would_damage_the_table(server: RestServer, tables: RestCatalog) -> None:
    """This shows that the tests of refusals detect damage."""
    with tables.load_table(ONE).transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": "0"})
    table = tables.load_table(ONE)
    server.faults.append(sent_again)
    with pytest.raises(CommitFailedException):
        table.append(pa.Table.from_batches([ROWS]))
    with pytest.raises(FileNotFoundError):
        rows(tables)


def test_a_commit_that_arrives_late_is_refused(server: RestServer, tables: RestCatalog) -> None:
    owner, late = owner_of(server), list[Carry]()

    def delayed(carry_out: Carry) -> Answer:
        late.append(carry_out)
        return status_only(504)

    for _ in range(2):
        change, number = write(owner, ONE), owner.next_number
        server.faults.append(delayed)
        with pytest.raises(CommitOutcomeUnknown, match="CommitStateUnknownException: Status: status 504") as unknown:
            owner.commit(checkpoint(100), {ONE: change}, number)
        if len(late) == 1:
            with pytest.raises(SqlStoreError, match="was not applied"):
                owner.resolve(number, unknown.value)
        else:
            new = owner_of(server)
            with pytest.raises(Fenced):
                owner.resolve(number, unknown.value)
        assert late[-1]()[0] == 409
    commit(new, 200, ONE)
    assert rows(tables) == [1, 2]


@pytest.mark.parametrize("arrives", [True, False])
def test_an_owner_resumes_once_none_of_its_commits_can_arrive(
    arrives: bool, server: RestServer, tables: RestCatalog
) -> None:
    owner, late = owner_of(server), list[Carry]()
    commit(owner, 100, ONE)

    def delayed(carry_out: Carry) -> Answer:
        late.append(carry_out)
        return status_only(504)

    change, number = write(owner, ONE), owner.next_number
    server.faults.append(delayed)
    with pytest.raises(CommitOutcomeUnknown):
        owner.commit(checkpoint(200), {ONE: change}, number)
    if arrives:
        assert late[0]()[0] == 200
    assert owner.resume() == checkpoint(200 if arrives else 100)
    assert arrives or late[0]()[0] == 409
    commit(owner, 300, ONE)
    assert rows(tables) == [1, 2] * (3 if arrives else 2)
    owner_of(server)
    with pytest.raises(Fenced):
        owner.resume()


def test_transient_and_permanent_failures_of_a_catalog_are_distinguished() -> None:
    lasting = [FileNotFoundError("gone"), PermissionError("denied"), ZeroDivisionError(), BadRequestError("no")]
    passing = [ConnectionResetError("reset"), OSError("AWS Error NETWORK_CONNECTION"), ServerError("500")]
    passing += [ServiceUnavailableError("503"), DisconnectedDatabase("SELECT", {}, Exception("server closed"))]
    assert [failure("store", error).retriable for error in lasting] == [False] * 4
    assert [failure("store", error).retriable for error in passing] == [True] * 5


def test_an_owner_that_hung_commits_nothing(server: RestServer, tables: RestCatalog, tmp_path: Path) -> None:
    old = owner_of(server)
    change = write(old, ONE)

    def hung(carry_out: Carry) -> Answer:
        commit(owner_of(server), 200, ONE)
        return carry_out()

    server.faults.append(hung)
    with pytest.raises(Fenced):
        old.commit(checkpoint(100), {ONE: change}, old.next_number)
    assert rows(tables) == [1, 2]
    assert owner_of(server).state.checkpoint == checkpoint(200)
    named = {Path(each.manifest_list.removeprefix("file://")) for each in tables.load_table(ONE).snapshots()}
    assert named == set(tmp_path.rglob("snap-*.avro")), "the manifests of the refused commit are removed"


def test_commits_of_other_writers_make_a_commit_retry(server: RestServer, tables: RestCatalog) -> None:
    owner = owner_of(server)

    def write_concurrently(carry_out: Carry) -> Answer:
        tables.load_table(ONE).append(pa.Table.from_batches([ROWS]))
        return carry_out()

    server.faults.append(write_concurrently)
    commit(owner, 100, ONE)
    assert rows(tables) == [1, 2, 1, 2]


def test_another_table_than_the_home_is_refused(server: RestServer, tables: RestCatalog) -> None:
    owner = owner_of(server)
    for work in (lambda: owner.register_table(TWO), lambda: owner.commit(checkpoint(1), {TWO: lambda *_: None}, 1)):
        with pytest.raises(InvalidInput, match=r"shop\.two: is not shop\.one, .* a REST catalog commits each table by"):
            work()
    store = IcebergShardStore(server.catalog(), ONE).add_table(TWO, SCHEMA)
    with pytest.raises(InvalidInput, match=r"shop\.two: is not shop\.one, .* a REST catalog commits each table by"):
        asyncio.run(store.restore_checkpoint("shard"))


def test_a_silent_server_does_not_block_an_owner_forever(
    server: RestServer, tables: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, answered = owner_of(server), threading.Event()
    monkeypatch.setattr(rest, "_TIMEOUT_S", (1.0, 0.05))

    def silent(carry_out: Carry) -> Answer:
        assert answered.wait(30)
        raise CutOff

    server.faults.append(silent)
    with pytest.raises(CommitOutcomeUnknown, match="ReadTimeout") as unknown:
        commit(owner, 100, ONE)
    answered.set()
    assert is_transient(unknown.value.__cause__)


def test_a_silent_token_server_does_not_block_an_owner_forever(
    server: RestServer, tables: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"type": "rest", "uri": server.url, "auth": {"type": "oauth2", "oauth2": {"client_id": "me"}}}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts connections, and never responds.
        host, port = silent.getsockname()
        home["auth"]["oauth2"] |= {"client_secret": "secret", "token_url": f"http://{host}:{port}/token"}
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda name: home)
        monkeypatch.setattr(rest, "_TIMEOUT_S", (1.0, 0.05))
        with pytest.raises(SqlStoreError, match="catalog lake does not answer: ReadTimeout"):
            IcebergHome.at(f"iceberg://lake/{ONE}")


def test_opening_a_catalog_that_returns_no_settings_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts connections, and never responds.
        host, port = silent.getsockname()
        home = {"type": "rest", "uri": f"http://{host}:{port}"}
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda name: home)
        monkeypatch.setattr(rest, "_TIMEOUT_S", (1.0, 0.05))
        with pytest.raises(SqlStoreError, match="catalog lake does not answer: ReadTimeout"):
            IcebergHome.at(f"iceberg://lake/{ONE}")
        set_configuration_timeout()
        with pytest.raises(requests.ReadTimeout):  # An application's own catalog.
            RestCatalog("lake", uri=home["uri"])


def test_reads_of_a_store_by_url_have_a_time_limit(
    server: RestServer, tables: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"type": "rest", "uri": server.url}
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda name: home)
    catalog = IcebergHome.at(f"iceberg://lake/{ONE}").catalog
    assert isinstance(catalog, RestCatalog)
    limits = {type(each).__name__ for each in catalog._session.adapters.values()}
    catalog._session.close()
    assert limits == {"_TimeoutAdapter"}


def test_the_outcome_of_a_commit_follows_from_the_tables_snapshots(tables: RestCatalog) -> None:
    table = tables.load_table(ONE)
    table.append(pa.Table.from_batches([ROWS]))
    table = tables.load_table(ONE)
    before = table.metadata
    transaction = table.transaction()
    transaction.append(pa.Table.from_batches([ROWS]))
    assert outcome_of(transaction, before) is CommitOutcome.OPEN
    for _ in range(3):
        tables.load_table(ONE).append(pa.Table.from_batches([ROWS]))
    now = tables.load_table(ONE).metadata
    assert outcome_of(transaction, now) is CommitOutcome.NEVER
    last = now.model_copy(update={"snapshots": [now.current_snapshot()]})
    assert outcome_of(transaction, TableMetadataUtil.parse_obj(last.model_dump(by_alias=True))) is CommitOutcome.OPEN
    tables.drop_table(ONE)
    assert outcome_of(transaction, tables.create_table(ONE, ROWS.schema).metadata) is CommitOutcome.NEVER
    tables.drop_table(ONE)


def test_tasks_get_no_secrets_of_the_catalog(server: RestServer, tables: RestCatalog) -> None:
    given = {"token": "t-secret", "header.X-Key": "h-secret", "s3.region": "here", "rest.signing-region": "r-secret"}
    catalog = RestCatalog("lake", uri=server.url, **given)
    writer = FileWriter.of(catalog.load_table(ONE), "folder")
    assert writer.io == {"s3.region": "here"}
