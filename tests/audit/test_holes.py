"""Trainings that moved more than epsilon covers are refused; `make mutants` shows that replay would find them."""

import pytest

from audit.holes import HOLES, SOUND, attacked, outcome


@pytest.mark.parametrize("name", HOLES)
def test_what_was_a_hole_is_refused(name):
    assert outcome(name) == "refused"


@pytest.mark.parametrize("name", SOUND)
def test_the_same_training_without_a_hole_is_clean(name):
    assert outcome(name) == "nothing"


def test_the_attacker_shows_no_more_than_the_claim():
    assert attacked() == "nothing"
