"""Faults that are planted in a copy of the sources, one at a time, to see whether the tests notice."""
