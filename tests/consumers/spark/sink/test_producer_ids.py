"""Tasks reuse a producer id once its last use is released, and never two tasks concurrently."""

import concurrent.futures
import time

from structlog.testing import capture_logs

from coranto.messages.uuids import clock_from_ns
from coranto_consumers.spark.sink.producer_ids import IdPool, ReleasedIds, Use


def release(driver: ReleasedIds, *acquired) -> None:
    driver.release(Use(use.producer, use.token, clock.tick()) for use, clock in acquired)


def test_an_id_is_reused_once_its_use_is_released(tmp_path):
    driver = ReleasedIds()
    driver.begin(1)
    first, lost = driver.pool().acquire(tmp_path), driver.pool().acquire(tmp_path)
    assert first.use.producer != lost.use.producer
    release(driver, first)

    again, other = driver.pool().acquire(tmp_path), driver.pool().acquire(tmp_path)
    assert again.use.producer == first.use.producer
    assert again.use.token != first.use.token
    assert other.use.producer not in (first.use.producer, lost.use.producer)
    # The current use is not the released one.
    assert driver.pool().acquire(tmp_path).use.producer not in {
        acquired.use.producer for acquired in (first, lost, other)
    }


def test_clocks_continue_after_the_last_use_if_time_goes_back(tmp_path):
    driver = ReleasedIds()
    driver.begin(1)
    first = driver.pool().acquire(tmp_path)
    ahead = clock_from_ns(time.time_ns() + 10**18)
    driver.release([first.use._replace(clock=ahead + 7)])
    assert driver.pool().acquire(tmp_path).clock.tick() > ahead + 7


def test_tasks_at_the_same_time_get_different_ids(tmp_path):
    driver = ReleasedIds()
    driver.begin(1)
    with concurrent.futures.ThreadPoolExecutor(8) as tasks:
        seen = set()
        for _ in range(20):
            pool = driver.pool()
            acquired = list(tasks.map(lambda _, pool=pool: pool.acquire(tmp_path), range(8)))
            ids = {use.producer for use, _ in acquired}
            assert len(ids) == 8
            seen |= ids
            release(driver, *acquired[:6])  # Two attempts were superseded.
    assert len(seen) == 8 + 19 * 2, "only ids of superseded attempts are replaced"


def test_executors_use_only_their_own_ids(tmp_path):
    driver = ReleasedIds()
    driver.begin(1)
    first = driver.pool().acquire(tmp_path / "one")
    release(driver, first)
    assert driver.pool().acquire(tmp_path / "two").use.producer != first.use.producer
    assert driver.pool().acquire(tmp_path / "one").use.producer == first.use.producer


def test_ids_outlive_a_run_unless_another_instance_ran_in_between(tmp_path):
    driver = ReleasedIds()
    driver.begin(4)
    first = driver.pool().acquire(tmp_path)
    release(driver, first)
    driver.begin(5)
    second = driver.pool().acquire(tmp_path)
    assert second.use.producer == first.use.producer
    release(driver, second)
    driver.begin(7)
    assert driver.pool().acquire(tmp_path).use.producer != first.use.producer


def test_without_a_folder_or_an_instance_ids_are_new(tmp_path):
    driver = ReleasedIds()
    driver.begin(1)
    first = driver.pool().acquire(None)
    release(driver, first)
    assert driver.pool().acquire(None).use.producer != first.use.producer
    assert IdPool().acquire(tmp_path).use.producer != IdPool().acquire(tmp_path).use.producer
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        assert driver.pool().acquire(tmp_path / "file").use.producer != first.use.producer
    assert [each["event"] for each in logs] == ["producer.id_not_reused"]


def test_the_drivers_memory_of_ids_is_bounded(tmp_path):
    driver = ReleasedIds()
    driver.begin(1)
    many = [IdPool().acquire(None).use for _ in range(1_010)]
    driver.release(many)
    assert driver.pool().released == tuple(many[10:])
