"""`@task.journal_publish`: publish the rows that a function yields, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airflow.providers.common.compat.sdk import (
    DecoratedOperator,
    TaskDecorator,
    determine_kwargs,
    task_decorator_factory,
)

from airflow_coranto.operators.publish import PublishOperator


class _DecoratedPublishOperator(DecoratedOperator, PublishOperator):  # type: ignore[misc]
    """A PublishOperator whose rows come from the decorated function."""

    custom_operator_name = "@task.journal_publish"
    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *PublishOperator.template_fields)

    def execute(self, context: Any) -> dict[str, Any]:
        def rows() -> Any:
            named = determine_kwargs(self.python_callable, self.op_args, {**context, **self.op_kwargs})
            return self.python_callable(*self.op_args, **named)

        return self._publish(context, rows)


def journal_publish_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Turn a function that returns rows into a task. Takes the arguments of PublishOperator except `rows`."""
    return task_decorator_factory(
        python_callable=python_callable,
        decorated_operator_class=_DecoratedPublishOperator,
        rows=(),
        **kwargs,
    )
