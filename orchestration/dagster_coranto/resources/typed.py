"""Resources for parameters of users' functions, by the parameters' classes, as in functions of `@dg.asset`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import dagster as dg

from coranto.errors import InvalidInput

T = TypeVar("T")


def resource_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters that are annotated with the class of a resource."""
    named = function.func if isinstance(function, partial) else function
    hints = get_type_hints(named if inspect.isroutine(named) else type(named).__call__, include_extras=True)
    return frozenset(name for name, hint in hints.items() if name != "return" and _is_resource(hint))


def _is_resource(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, dg.ConfigurableResource | dg.ConfigurableIOManagerFactory | dg.ResourceDefinition)
    marked: Any = dg.ResourceParam
    return get_origin(hint) is Annotated and hint == marked[get_args(hint)[0]]


def resource_arguments(function: Callable[..., Any], resources: object) -> Mapping[str, Any]:
    """Return the arguments for `resource_parameters`, from the resources of a run."""
    return {name: getattr(resources, name) for name in resource_parameters(function)}


def resource_of(resources: object, key: str, kind: type[T]) -> T:
    """Return the resource `key` of a run. Raises InvalidInput when it is of another class than `kind`."""
    found = getattr(resources, key)
    if not isinstance(found, kind):
        raise InvalidInput(
            f"the resource {key!r} is a {type(found).__name__}; bind a {kind.__name__} to it, or name the key of one",
            field="resources",
        )
    return found


def initialize_resource(resource: T) -> T:
    """Return a resource with its environment variables resolved, for use outside of runs, as in a sensor."""
    return resource.process_config_and_initialize() if isinstance(resource, dg.ConfigurableResource) else resource
