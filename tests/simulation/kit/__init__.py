"""The checks of simulated journals, and a twin of TCP."""
