"""Journals and tables as asset specs: the translator, metadata, options of builders, facts of tables."""
