"""Positions of consumers in their journals: their lag, and moves by an operator."""
