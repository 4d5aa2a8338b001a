"""The compiled driver: the eager one, traced and compiled."""
