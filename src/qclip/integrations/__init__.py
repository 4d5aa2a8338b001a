"""Integrations of other libraries: one thin module for each. Their optional imports live here and nowhere else."""
