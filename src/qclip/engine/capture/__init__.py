"""Capture: the use of parameters in a forward pass, and the checks before and after it."""
