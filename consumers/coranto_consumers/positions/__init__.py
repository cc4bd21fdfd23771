"""Positions of consumers in their journals: how far behind they are, and moves of them by an operator."""
