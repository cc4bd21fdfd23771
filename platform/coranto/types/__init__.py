"""Message types: their definitions, and a registry of definitions by name and version.

A definition has the framing of messages, the place of their UUID, and their fields. A registry is a journal of
definitions. The label `app.gazette.dev/message-type` of a journal names the type of its messages, so programs that are
given a registry read journals without a schema of their own, and refuse to publish messages that do not fit.

`coranto.types.arrow` maps fields to Arrow's types, and needs the `consumers` extra.
"""

from typing import TYPE_CHECKING

from coranto.lazy import lazy_names
from coranto.types.blocking import SyncTypeRegistry
from coranto.types.catalog import Catalog, TypeVersion
from coranto.types.compatibility import Compatibility, FieldProblem
from coranto.types.definitions import CsvForm, FixedForm, JsonForm, LinesForm, MessageType
from coranto.types.kinds import TypeField, format_fields
from coranto.types.parsing import parse_fields
from coranto.types.publishing import CheckedJson, framing_of
from coranto.types.references import TypeReference, parse_reference
from coranto.types.registry import Registration, TypeRegistry

if TYPE_CHECKING:
    from coranto.types.models import type_of_model

__getattr__ = lazy_names(__name__, {"type_of_model": "coranto.types.models"})

__all__ = [
    "Catalog",
    "CheckedJson",
    "Compatibility",
    "CsvForm",
    "FieldProblem",
    "FixedForm",
    "JsonForm",
    "LinesForm",
    "MessageType",
    "Registration",
    "SyncTypeRegistry",
    "TypeField",
    "TypeReference",
    "TypeRegistry",
    "TypeVersion",
    "format_fields",
    "framing_of",
    "parse_fields",
    "parse_reference",
    "type_of_model",
]
