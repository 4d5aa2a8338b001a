"""Training on several processes: see ``distributed`` of `qclip.make_private`, and docs/scale.md."""

from qclip.training.ranks import LostRank

__all__ = ["LostRank"]
