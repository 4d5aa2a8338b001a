"""The summary of a run has one definition: what is written is what is read, and nothing else is."""

import json

import pytest

from made_runs import made_summary
from qclip.apps.run_summary import Certificate, Summary

TERMS = Certificate(
    total=0.6, optimisation=0.3, variance=0.2, bias=0.1, this_run=0.7, confidence=0.95, theorem="that", mean="a mean"
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epsilon": None, "accuracy": None, "private": False},
        {"certificate": TERMS},
        {"certificate_refused": "rescale_to_unit_norm = True must be False"},
        {"seconds": 2},  # JSON may drop what a whole number has after the point
    ],
)
def test_what_is_written_is_what_is_read(changes):
    summary = made_summary(**changes)
    assert Summary.from_json(json.loads(json.dumps(summary.as_json()))) == summary


@pytest.mark.parametrize("name", made_summary().as_json())
def test_every_part_must_be_there(name):
    found = made_summary().as_json()
    del found[name]
    with pytest.raises(ValueError, match=rf"summary\.json has no {name};"):
        Summary.from_json(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"refused": "why"}, r"summary\.json has an unknown field refused;"),
        ({"certificate": {"refused": "why"}}, r"summary\.json has no certificate\.total;"),
        (
            {"certificate": TERMS.__dict__ | {"bias": None}},
            r"certificate\.bias = None in summary\.json has the wrong type",
        ),
        ({"certificate": "0.6"}, r"certificate = '0\.6' in summary\.json has the wrong type"),
        ({"steps": "40"}, r"steps = '40' in summary\.json has the wrong type"),
        ({"steps": True}, r"steps = True in summary\.json has the wrong type"),
        ({"steps": 1.5}, r"steps = 1\.5 in summary\.json has the wrong type"),
        ({"delta": None}, r"delta = None in summary\.json has the wrong type"),
        ({"groups": {"all": 1}}, r"groups = .* in summary\.json has the wrong type"),
        ({"settings": []}, r"settings = \[\] in summary\.json has the wrong type"),
    ],
)
def test_what_a_run_does_not_write_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Summary.from_json(made_summary().as_json() | changes)
