"""Applications, their outputs and options."""
