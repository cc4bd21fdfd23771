"""Fragments: values, codecs, stores, paths in stores, and retention."""
