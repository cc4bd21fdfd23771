"""Each fragment's parts are read by one executor, which caches them, and executors have balanced loads."""

from hypothesis import given
from hypothesis import strategies as st

from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.inputs.locality import FragmentLocality

EXECUTORS = ("executor_a_1", "executor_b_2", "executor_c_3")


def fragments_of(assigned: dict[str, list[Range]], cuts: dict[str, list[int]]) -> dict[tuple[str, int], set[str]]:
    """Return the executors that read parts of each fragment."""
    found: dict[tuple[str, int], set[str]] = {}
    for executor, ranges in assigned.items():
        for each in ranges:
            begins = [cut for cut in cuts[each.journal] if cut < each.end]
            for cut in begins[len([cut for cut in begins if cut <= each.begin]) - 1 :]:
                found.setdefault((each.journal, cut), set()).add(executor)
    return found


cut_lists = st.lists(st.integers(1, 999), max_size=12, unique=True).map(lambda cuts: [0, *sorted(cuts)])


@given(st.dictionaries(st.sampled_from("abc"), cut_lists, min_size=1), st.integers(1, 1000), st.integers(1, 3))
def test_content_is_read_once_and_each_fragment_by_one_executor(cuts, step, count):
    locality, executors, keepers = FragmentLocality(), EXECUTORS[:count], {}
    for begin in range(0, 1000, step):
        end = min(1000, begin + step)
        ranges = [Range(journal, begin, end, 1000) for journal in cuts]
        assigned = locality.assign(ranges, cuts, executors, 1000)

        assert list(assigned) == list(executors)
        for journal in cuts:
            parts = sorted(part for mine in assigned.values() for part in mine if part.journal == journal)
            assert [part.begin for part in parts] == [begin, *(part.end for part in parts[:-1])]
            assert parts[-1].end == end
            assert [part.aligned for part in parts] == [True, *[False] * (len(parts) - 1)]
        for fragment, readers in fragments_of(assigned, cuts).items():
            assert len(readers | keepers.setdefault(fragment, readers)) == 1


def test_executors_have_equal_shares_of_adjacent_fragments():
    cuts = {"a": list(range(0, 1200, 100))}
    assigned = FragmentLocality().assign([Range("a", 0, 1200, 1200)], cuts, EXECUTORS, 100)

    assert {each: [(part.begin, part.end) for part in mine] for each, mine in assigned.items()} == {
        EXECUTORS[0]: [(0, 400)],
        EXECUTORS[1]: [(400, 800)],
        EXECUTORS[2]: [(800, 1200)],
    }


def test_fragments_of_a_lost_executor_move_to_others():
    cuts, locality = {"a": [0, 100, 200]}, FragmentLocality()
    whole = [Range("a", 0, 300, 300)]
    locality.assign(whole, cuts, EXECUTORS, 100)

    assigned = locality.assign(whole, cuts, EXECUTORS[1:], 100)

    assert {each: sum(part.length for part in mine) for each, mine in assigned.items()} == {
        EXECUTORS[1]: 200,
        EXECUTORS[2]: 100,
    }


def test_large_parts_of_a_fragment_use_all_executors_and_small_parts_one():
    cuts, locality = {"a": [0]}, FragmentLocality()
    much = locality.assign([Range("a", 0, 300, 1000)], cuts, EXECUTORS, 30)
    assert [sum(part.length for part in mine) for mine in much.values()] == [100, 100, 100]

    little = locality.assign([Range("a", 300, 330, 1000)], cuts, EXECUTORS, 30)
    assert sorted(len(mine) for mine in little.values()) == [0, 0, 1]


def test_each_slice_has_its_executor():
    cuts = {"a": [0, 100, 200]}
    slices, locations = FragmentLocality().plan_slices(
        [Range("a", 0, 300, 300)], max_bytes=50, max_slices=12, cuts=cuts, executors=EXECUTORS
    )
    assert len(slices) == len(locations) == 6
    assert set(locations) == set(EXECUTORS)
