"""Decorators of tasks."""
