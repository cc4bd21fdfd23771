"""The operators. Import each from its module."""
