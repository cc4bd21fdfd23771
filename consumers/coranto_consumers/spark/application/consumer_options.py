"""The options of Spark consumers, for programs, Dagster and Airflow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self, get_args, get_type_hints

from coranto.client.retry import JOB_SECONDS
from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER
from coranto.names import validate_journal
from coranto_consumers.journals.framings import ReadFraming, chosen_framing, parse_framing
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy, dead_letter_table, policy_of
from coranto_consumers.outputs.identity import checked_codes

DEFAULT_TRANSACTION_BYTES: Final = 256 << 20
DEFAULT_PARTITION_BYTES: Final = 32 << 20
OF_WINDOWS: Final = frozenset({"atomic", "retry_timeout", "max_partition_bytes", "misfits", "accept_changes"}) | {
    *("uuid_pointer", "framing", "registry")
}
"""The options of a `WindowConsumer`: it reads a window as a whole, so it is atomic, and fails if content is gone."""
OF_BATCHES: Final = frozenset({"retry_timeout", "misfits", "fail_on_data_loss", "accept_changes"})
"""The options of `exactly_once`: the query's source reads the content of its batches."""
_PLAIN: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_POLICIES: Final = {"fail": MisfitPolicy.FAIL, "nulls": MisfitPolicy.NULLS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The options of a `SparkConsumer`. Raises InvalidInput for bad values.

    A `WindowConsumer` takes those in `OF_WINDOWS`, and `exactly_once` those in `OF_BATCHES`.
    """

    max_transaction_bytes: int = DEFAULT_TRANSACTION_BYTES
    """The new content that a transaction reads, approximately: at most so much, and as much again of each journal for
    producers' transactions that were open before. Longer producer transactions are delivered in several transactions
    (`LongTransactions`). The next transaction is read while one commits, so Spark keeps the rows of up to two."""
    max_transaction_messages: int | None = None
    """The most new messages of a transaction, approximately, by the mean length of earlier messages
    (`MessageBound`)."""
    atomic: bool = False
    """True to deliver all messages that one acknowledgement commits in a journal in one transaction, within
    `max_transaction_bytes` of the journal from the first of them on. A longer set ends the run before any of it is
    delivered. Parts of a set that an earlier run without this option has delivered stay delivered."""
    min_transaction_seconds: float = 0.0
    """The least seconds between the times when a service (`run_until_stopped`) begins to catch up."""
    retry_timeout: float = JOB_SECONDS
    """The seconds, since the first failure after the last progress, that a run retries an unavailable store or broker.
    A service retries without a limit."""
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    """The most bytes that a task reads, approximately."""
    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL
    """The treatment of messages that do not fit the application's columns, whose UUID cannot be read, or whose rows
    the store rejects (`rejections.py`): they end the run; or the application gets them, with nulls for the values that
    do not fit (`MisfitPolicy.NULLS`); or they become `DeadLetters` in the same transaction."""
    fail_on_data_loss: bool = True
    """True to end the run if content is gone before it was read: removed by retention, or with a journal that was
    deleted and recreated. If False, the consumer continues after the gap, and logs and reports the exact gap. Of a
    transaction that began in lost content, it delivers the rest."""
    accept_changes: str | None = None
    """The code that confirms a change of the consumer (`outputs/identity.py`), from the error ConsumerChanged."""
    uuid_pointer: str = DEFAULT_UUID_POINTER
    """The JSON pointer to a message's UUID."""
    framing: ReadFraming | None = None
    """The framing of messages that are not lines of JSON (`framings.py`)."""
    registry: str | None = None
    """The journal that registers message types. The type determines framing and UUIDs: the application's
    `message_type`, or else the type that the labels of all journals name. The first run chooses the version, for the
    life of the instance."""

    def __post_init__(self) -> None:
        policy_of(self.misfits)
        if self.accept_changes is not None:
            checked_codes(self.accept_changes)
        for name, example in (("max_transaction_bytes", 268435456), ("max_partition_bytes", 33554432)):
            value = getattr(self, name)
            if value < 1:
                raise InvalidInput(f"{value} is not a positive number of bytes, such as {example}", field=name)
        if self.max_transaction_messages is not None and self.max_transaction_messages < 1:
            raise InvalidInput(
                f"{self.max_transaction_messages} is not a positive number of messages; leave it out for no such bound",
                field="max_transaction_messages",
            )
        if not 0 <= self.min_transaction_seconds < float("inf"):
            raise InvalidInput(
                f"{self.min_transaction_seconds} is not a number of seconds from 0 on", field="min_transaction_seconds"
            )
        if not self.retry_timeout >= 0:
            raise InvalidInput(f"{self.retry_timeout} is not a number of seconds from 0 on", field="retry_timeout")
        chosen_framing(self.framing, self.uuid_pointer)
        if self.registry is not None:
            validate_journal(self.registry, kind="registry")
            if self.framing is not None or self.uuid_pointer != DEFAULT_UUID_POINTER:
                name = "uuid_pointer" if self.framing is None else "framing"
                raise InvalidInput("is determined by the registry; leave it out", field=name)

    @classmethod
    def of(cls, given: Mapping[str, object], *, by_window: bool = False) -> Self:
        """Return the options for plain values of YAML or JSON. Raises InvalidInput.

        `misfits` is `fail`, `nulls`, or the place of dead letters: `{"table": "letters"}` (for a `WindowConsumer` if
        `by_window`) or `{"journals": SELECTOR}`. `framing` has the options that choose one, such as
        `{"framing": "csv", "csvColumns": 3}`. Other values, and objects for these two, are as in this class.
        """
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise InvalidInput(
                f"there is no such option of a consumer; there are {', '.join(sorted(known))}", field=unknown[0]
            )
        values: dict[str, Any] = dict(given)
        if isinstance(misfits := values.get("misfits"), str | Mapping):
            values["misfits"] = _misfits(misfits, by_window)
        if isinstance(framing := values.get("framing"), Mapping):
            options = {str(name).lower(): str(value) for name, value in framing.items()}
            values["framing"] = parse_framing(options, tolerant=False)
        for name, hint in get_type_hints(cls).items():
            kind, *others = get_args(hint) or (hint,)
            kinds = (int, float) if kind is float else (kind, *others)
            if name in values and kind in _PLAIN and type(values[name]) not in kinds:
                raise InvalidInput(f"{values[name]!r} is not {_PLAIN[kind]}", field=name)
        return cls(**values)

    def require_only(self, names: Collection[str], reason: str) -> None:
        """Raise InvalidInput for other options than `names` that do not have their defaults."""
        for each in fields(self):
            if each.name not in names and getattr(self, each.name) != each.default:
                raise InvalidInput(f"has no meaning for {reason}; leave it out", field=each.name)

    @property
    def chosen_framing(self) -> ReadFraming:
        """The framing that `framing` and `uuid_pointer` choose. With a registry, the type's takes its place."""
        return chosen_framing(self.framing, self.uuid_pointer)


def _misfits(given: str | Mapping[str, Any], by_window: bool) -> MisfitPolicy | DeadLetters:
    if isinstance(given, str):
        if given not in _POLICIES:
            raise InvalidInput(
                f"{given!r} is neither fail nor nulls, nor a place such as {{'table': 'letters'}}", field="misfits"
            )
        return _POLICIES[given]
    if unknown := sorted(set(given) - {"table", "journals"}):
        raise InvalidInput(f"{unknown[0]!r} is not a place of dead letters: name a table or journals", field="misfits")
    table, journals = given.get("table"), given.get("journals")
    if not isinstance(table, str | None) or not isinstance(journals, str | Sequence | None):
        raise InvalidInput("a table is a name, and journals are a label selector or a list of names", field="misfits")
    return DeadLetters(dead_letter_table(table, by_window=by_window) if table else None, journals or ())
