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
WINDOW_OPTIONS: Final = frozenset({"atomic", "retry_timeout", "max_partition_bytes", "misfits", "accept_changes"}) | {
    *("uuid_pointer", "framing", "registry")
}
"""The options of a `WindowConsumer`. It reads a window as a whole, so it is always atomic, and fails if content is
gone."""
BATCH_OPTIONS: Final = frozenset({"retry_timeout", "misfits", "fail_on_data_loss", "accept_changes"})
"""The options of `exactly_once`. Other options are for reading, and the query's own source reads the batches."""
_PLAIN: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_POLICIES: Final = {"fail": MisfitPolicy.FAIL, "nulls": MisfitPolicy.NULLS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The options of a `SparkConsumer`. Raises InvalidInput for invalid values.

    A `WindowConsumer` accepts only the options in `WINDOW_OPTIONS`, and `exactly_once` only those in `BATCH_OPTIONS`.
    """

    max_transaction_bytes: int = DEFAULT_TRANSACTION_BYTES
    """The maximum bytes of new content that a transaction reads, approximately. For producer transactions that were
    open before, it may read as much again of each journal. Longer producer transactions are delivered in several
    consumer transactions (`LongTransactions`). The next transaction is read while one commits, so Spark holds the rows
    of up to two."""
    max_transaction_messages: int | None = None
    """The maximum number of new messages of a transaction, approximately: it is estimated from the mean length of
    earlier messages (`MessageBound`)."""
    atomic: bool = False
    """True to deliver all messages that one acknowledgement commits in a journal in one transaction. They must be
    within `max_transaction_bytes` of the journal, from the first of them on: a longer set ends the run before any of it
    is delivered. Parts of a set that an earlier run without this option has delivered stay delivered."""
    min_transaction_seconds: float = 0.0
    """The minimum seconds from one start of catching up to the next, for a service (`run_until_stopped`)."""
    retry_timeout: float = JOB_SECONDS
    """The time in seconds that a run retries an unavailable store or broker, from the first failure after the last
    progress. A service retries without a limit by default."""
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    """The maximum bytes that a task reads, approximately."""
    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL
    """The policy for messages that do not fit the application's columns, whose UUID cannot be read, or whose rows the
    store rejects (`rejections.py`): they end the run; or the application gets them, with nulls for the values that do
    not fit (`MisfitPolicy.NULLS`); or they become `DeadLetters` in the same transaction."""
    fail_on_data_loss: bool = True
    """True to end the run if content was removed before it was read: by retention, or because a journal was deleted and
    recreated. If False, the consumer logs and reports the exact gap, and continues after it. If a transaction began in
    the gap, the rest of it is delivered."""
    accept_changes: str | None = None
    """The code that confirms a change of the consumer (`outputs/identity.py`), from the error ConsumerChanged."""
    uuid_pointer: str = DEFAULT_UUID_POINTER
    """The JSON pointer to a message's UUID."""
    framing: ReadFraming | None = None
    """The framing of messages that are not lines of JSON (`framings.py`)."""
    registry: str | None = None
    """The journal that registers message types. The type determines framing and UUIDs. It is the application's
    `message_type`, or else the type that the labels of all journals name. The first run resolves the version, for the
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
        """Build the options from plain values of YAML or JSON. Raises InvalidInput.

        `misfits` is `fail`, `nulls`, or the destination of dead letters: `{"table": "letters"}` (for a `WindowConsumer`
        if `by_window`) or `{"journals": SELECTOR}`. `framing` is a mapping of framing options, such as
        `{"framing": "csv", "csvColumns": 3}`. Both may also be objects, as in this class. Other values are as in this
        class.
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
        """Raise InvalidInput if an option outside of `names` differs from its default."""
        for each in fields(self):
            if each.name not in names and getattr(self, each.name) != each.default:
                raise InvalidInput(f"has no meaning for {reason}; leave it out", field=each.name)

    @property
    def chosen_framing(self) -> ReadFraming:
        """The framing that `framing` and `uuid_pointer` choose. With a registry, the type's framing is used instead."""
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
