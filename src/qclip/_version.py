"""The version of qclip."""

__version__ = "0.1.0"
