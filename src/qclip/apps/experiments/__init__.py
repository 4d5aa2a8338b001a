"""Every claim of the paper and of docs/theory.md as an experiment, one module per family."""
