"""Audits as asset checks with their schedules and alerts, and recovery as jobs."""
