"""Capture: which functions consumed which parameters in a forward pass."""
