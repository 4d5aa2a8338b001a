"""Thresholds: the clip norms of each step. Each is an immutable description; the run keeps its state."""

from qclip.thresholds.balanced import BalancedThreshold
from qclip.thresholds.constant import Constant
from qclip.thresholds.exact_quantile import ExactQuantile
from qclip.thresholds.geometric_quantile import GeometricQuantile
from qclip.thresholds.histogram_quantile import HistogramQuantile
from qclip.thresholds.private_quantile import PrivateQuantile
from qclip.thresholds.rolling_quantile import RollingQuantile
from qclip.thresholds.slack_quantile import SlackQuantile
from qclip.thresholds.threshold import Answer, Conditions, Count, Question, Slack, Threshold, describe

__all__ = [
    "Answer",
    "BalancedThreshold",
    "Conditions",
    "Constant",
    "Count",
    "ExactQuantile",
    "GeometricQuantile",
    "HistogramQuantile",
    "PrivateQuantile",
    "Question",
    "RollingQuantile",
    "Slack",
    "SlackQuantile",
    "Threshold",
    "describe",
]
