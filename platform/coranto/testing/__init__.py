"""Helpers for tests of programs that use Coranto, and for Coranto's own."""
