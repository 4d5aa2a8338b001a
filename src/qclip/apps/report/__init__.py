"""Figures and self-contained HTML."""
