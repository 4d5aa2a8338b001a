"""The theorems of the paper, their corrections and our sharper versions, as functions of numbers. Needs no torch.

docs/theory.md states and proves each of them. Everywhere ``form`` is "sharp" (the default), "corrected" (the paper's
argument, repaired) or "printed" (the paper's text; false for Theorem 2).
"""

from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import Bound, bound, bound_private, max_step, max_step_private
from qclip.theory.certificate import Certificate, certificate
from qclip.theory.fixed_clip import fixed_clip_bound
from qclip.theory.groups import GroupNoise, bound_groups, group_noise
from qclip.theory.lemmas import bias_floor, lemma1_bias, lemma1_threshold, lemma2_descent, squared_bias
from qclip.theory.one_run import one_run_certificate
from qclip.theory.plan import CoupledPlan, Move, Plan, Privacy, plan
from qclip.theory.rates import FORMS, Form, Rates, rates
from qclip.theory.weighted import weighted_certificate

__all__ = [
    "FORMS",
    "Assumptions",
    "Bound",
    "Certificate",
    "CoupledPlan",
    "Form",
    "GroupNoise",
    "Move",
    "Plan",
    "Privacy",
    "Rates",
    "bias_floor",
    "bound",
    "bound_groups",
    "bound_private",
    "certificate",
    "fixed_clip_bound",
    "group_noise",
    "lemma1_bias",
    "lemma1_threshold",
    "lemma2_descent",
    "max_step",
    "max_step_private",
    "one_run_certificate",
    "plan",
    "rates",
    "squared_bias",
    "weighted_certificate",
]
