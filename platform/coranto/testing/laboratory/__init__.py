"""Experiments on real processes: start them, apply faults and wait for the effect. Shared by all fault runs."""
