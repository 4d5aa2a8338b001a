"""Federated learning with differential privacy for clients: updates of a round in, a private mean out.

A cohort is to `Aggregator` what a logical batch is to training, and a client's update what an example's gradient is.
"""

from qclip.federated.aggregator import Aggregator
from qclip.federated.answers import Terms, answered
from qclip.federated.plan import RoundPlan

__all__ = ["Aggregator", "RoundPlan", "Terms", "answered"]
