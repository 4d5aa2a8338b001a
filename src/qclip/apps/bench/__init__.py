"""Benchmarks of one training step in every mode, and of whole loops."""
