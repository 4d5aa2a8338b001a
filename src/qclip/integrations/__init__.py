"""Other libraries: one thin module for each. Optional imports live here and nowhere else."""
