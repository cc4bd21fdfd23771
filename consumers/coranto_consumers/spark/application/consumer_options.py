"""The options of Spark consumers, for programs, Dagster and Airflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from coranto.client.retry import JOB_SECONDS
from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER
from coranto.names import validate_journal
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy, dead_letter_table, policy_of
from coranto_consumers.outputs.identity import checked_codes
from coranto_consumers.spark.journals.framings import ReadFraming, chosen_framing, parse_framing

DEFAULT_TRANSACTION_BYTES: Final = 256 << 20
DEFAULT_PARTITION_BYTES: Final = 32 << 20
_OF_WINDOWS: Final = (
    "retry_timeout",
    "max_partition_bytes",
    "misfits",
    "accept_changes",
    "uuid_pointer",
    "framing",
    "registry",
)
_PLAIN: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "max_transaction_bytes": ((int,), "a whole number"),
    "max_transaction_messages": ((int, type(None)), "a whole number"),
    "min_transaction_seconds": ((int, float), "a number"),
    "retry_timeout": ((int, float), "a number"),
    "max_partition_bytes": ((int,), "a whole number"),
    "fail_on_data_loss": ((bool,), "true or false"),
    "accept_changes": ((str,), "a text"),
    "uuid_pointer": ((str,), "a text"),
    "registry": ((str,), "a text"),
}
_POLICIES: Final = {"fail": MisfitPolicy.FAIL, "nulls": MisfitPolicy.NULLS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The options of a `SparkConsumer`, which documents them. Raises InvalidInput for bad values."""

    max_transaction_bytes: int = DEFAULT_TRANSACTION_BYTES
    max_transaction_messages: int | None = None
    min_transaction_seconds: float = 0.0
    retry_timeout: float = JOB_SECONDS
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL
    fail_on_data_loss: bool = True
    accept_changes: str = ""
    uuid_pointer: str = DEFAULT_UUID_POINTER
    framing: ReadFraming | None = None
    registry: str = ""

    def __post_init__(self) -> None:
        policy_of(self.misfits)
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
        if self.registry:
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
        for name, (kinds, wanted) in _PLAIN.items():
            if name in values and type(values[name]) not in kinds:
                raise InvalidInput(f"{values[name]!r} is not {wanted}", field=name)
        return cls(**values)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a `SparkConsumer`."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def of_windows(self) -> dict[str, Any]:
        """Return the arguments of a `WindowConsumer`. Raises InvalidInput for options that do not apply to it."""
        for each in fields(self):
            if each.name not in _OF_WINDOWS and getattr(self, each.name) != each.default:
                raise InvalidInput(
                    "has no meaning for a consumer by windows: a window is read as a whole, and fails if content is "
                    "gone; leave it out",
                    field=each.name,
                )
        return {name: getattr(self, name) for name in _OF_WINDOWS}

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
    return DeadLetters(
        dead_letter_table(table, by_window=by_window) if table else None, journals if journals is not None else ()
    )
