"""Registers: which checks they match, and what an append leaves of them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.registers import after, match, replaced

JOURNAL = "a/journal"


def request(**fields: object) -> pb.AppendRequest:
    return pb.AppendRequest(journal=JOURNAL, **fields)  # type: ignore[arg-type]


def test_union_overrides_present_labels_and_subtraction() -> None:
    registers = labels.label_set(author="me", epoch="1")
    changed = after(
        request(
            subtract_registers=labels.label_set(epoch="1", author="you"),
            union_registers=labels.label_set(author="she"),
        ),
        registers,
    )
    assert changed == labels.label_set(author="she")
    assert after(request(), registers) == registers


LABELS = st.builds(
    pb.Label, name=st.sampled_from(["aa", "bb", "cc", "x y"]), value=st.sampled_from(["", "1", "2", "é", "no way"])
)
SETS = st.lists(LABELS, max_size=4).map(lambda found: pb.LabelSet(labels=found))


def is_well_formed(message: pb.LabelSet | pb.AppendRequest) -> bool:
    try:
        labels.validate_label_set(message) if isinstance(message, pb.LabelSet) else validate(message)
    except InvalidInput:
        return False
    return True


@given(SETS.filter(is_well_formed), SETS, st.none() | SETS, SETS, st.booleans(), st.booleans())
@example(labels.label_set(aa="1"), labels.label_set(aa="1"), None, labels.label_set(aa="2"), False, False)
@example(pb.LabelSet(), pb.LabelSet(), None, labels.label_set(aa="2"), False, False)
def test_registers_computed_in_one_pass_are_those_of_the_rules(
    registers: pb.LabelSet,
    include: pb.LabelSet,
    exclude: pb.LabelSet | None,
    union: pb.LabelSet,
    subtracts: bool,
    prefix: bool,
) -> None:
    for label in union.labels:
        label.prefix = prefix
    asked = request(check_registers=pb.LabelSelector(include=include, exclude=exclude), union_registers=union)
    if subtracts:
        asked.subtract_registers.CopyFrom(labels.label_set(bb="1"))
    before = registers.SerializeToString()
    expected = replaced(asked, registers)
    assert registers.SerializeToString() == before
    if expected is not None:
        validate(asked)
        assert match(asked, registers)
        assert expected == after(asked, registers)


def test_one_pass_serves_an_append_that_replaces_one_register() -> None:
    registers = labels.label_set({"coranto.dev/held": "1", "entry": "one", "other": "two"})
    asked = request(
        check_registers=labels.label_selector(include={"coranto.dev/held": "", "entry": "one"}),
        union_registers=labels.label_set(entry="next"),
    )
    assert replaced(asked, registers) == labels.label_set({"coranto.dev/held": "1", "entry": "next", "other": "two"})
    asked.union_registers.labels[0].value = "é"  # Right, but for others to tell.
    assert replaced(asked, registers) is None
    asked.union_registers.labels[0].value = "next"
    asked.content = b"beside parameters"
    assert replaced(asked, registers) is None
