"""The operators. Import them from here."""

from airflow_coranto.operators.audit import AuditOperator
from airflow_coranto.operators.publish import PublishOperator
from airflow_coranto.operators.recovery import (
    ApproveRecoveryOperator,
    PlanRecoveryOperator,
    RecoverOperator,
    recovery_with_approval,
)
from airflow_coranto.operators.spark import SparkConsumerOperator
from airflow_coranto.operators.specs import ApplySpecsOperator
from airflow_coranto.operators.wait import WaitForJournalsOperator

__all__ = [
    "ApplySpecsOperator",
    "ApproveRecoveryOperator",
    "AuditOperator",
    "PlanRecoveryOperator",
    "PublishOperator",
    "RecoverOperator",
    "SparkConsumerOperator",
    "WaitForJournalsOperator",
    "recovery_with_approval",
]
