"""Proofs: which rows belong to which example, tested on the model itself."""
