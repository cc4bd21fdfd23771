"""Fragments: values, codecs, stores, paths in them, and retention."""
