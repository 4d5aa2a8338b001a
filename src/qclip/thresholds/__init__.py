"""Thresholds: where to clip. One estimator per file; each is an immutable description, its state lives in the run."""

from qclip.thresholds.constant import Constant
from qclip.thresholds.private_quantile import PrivateQuantile
from qclip.thresholds.threshold import Count, Threshold

__all__ = ["Constant", "Count", "PrivateQuantile", "Threshold"]
