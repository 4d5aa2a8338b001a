"""Digits, split among the clients of a federated run."""
