"""Thresholds: where to clip. One estimator per file; each is an immutable description, its state lives in the run."""

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
