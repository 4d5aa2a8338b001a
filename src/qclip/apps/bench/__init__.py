"""Benchmarks of one training step in every mode, its growth, whole loops, and the largest models that fit."""
