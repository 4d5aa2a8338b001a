"""QC-SGD and its relatives on stochastic problems with exact oracles. Needs no torch."""
