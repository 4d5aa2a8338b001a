"""What `qclip reproduce` writes."""

import json
import re

import pytest

pytest.importorskip("matplotlib")

from qclip.apps.experiments import reproduce as module
from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.experiments.formulas import FORMULAS
from qclip.apps.experiments.reproduce import reproduce, select
from qclip.apps.report.page import formula, symbols

CHEAP = ("lemma1-proof-step", "term2-direction")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduce") / "deep" / "folder"
    return out, reproduce(out, quick=True, only=CHEAP)


def test_claims_json_has_what_it_promises(written):
    out, rows = written
    entries = json.loads((out / "claims.json").read_text())
    assert [entry["id"] for entry in entries] == list(CHEAP)
    for entry, row in zip(entries, rows, strict=True):
        assert {"id", "claim", "equation", "expected", "measured", "error", "verdict", "seconds"} <= entry.keys()
        assert entry["verdict"] == row.outcome.verdict == "erratum"
        assert entry["seconds"] >= 0
        if entry["figure"]:
            assert (out / entry["figure"]).read_bytes().startswith(b"\x89PNG")


def test_the_report_is_one_self_contained_file(written):
    out, rows = written
    html = (out / "report.html").read_text()
    assert "<script" not in html
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', html))
    assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)"', html))
    for row in rows:
        assert f'id="{row.claim.id}"' in html
        shown = symbols(row.outcome.measured)
        assert shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in html
    assert html.count("<math ") == sum(row.claim.id in FORMULAS for row in rows) > 0


def test_every_formula_belongs_to_a_claim_and_is_read_whole():
    assert set(FORMULAS) <= {claim.id for claim in module.CLAIMS}
    for tex in FORMULAS.values():
        assert "\\" not in formula(tex)  # a command that was not understood stays as it was


def test_nothing_is_left_half_written(written):
    out, _ = written
    assert not list(out.glob("*.part"))


def test_select_keeps_the_order_of_the_report_and_names_near_misses():
    assert [c.id for c in select(("certificate", "lemma1-bias"))] == ["lemma1-bias", "certificate"]
    assert len(select(())) == len(module.CLAIMS)
    with pytest.raises(ValueError, match=r"certifcate.*did you mean certificate"):
        select(("certifcate",))


def test_an_interrupted_run_leaves_what_it_found(tmp_path, monkeypatch):
    @claim("stops", "A claim that is interrupted", "nowhere")
    def stops(effort: Effort) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "CLAIMS", (select(CHEAP[:1])[0], stops))
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path, quick=True)
    assert [entry["id"] for entry in json.loads((tmp_path / "claims.json").read_text())] == [CHEAP[0]]


def test_a_claim_that_cannot_be_run_fails_and_the_others_go_on(tmp_path, monkeypatch):
    @claim("raises", "A claim that raises", "nowhere")
    def raises(effort: Effort) -> Outcome:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(module, "CLAIMS", (raises, select(CHEAP[:1])[0]))
    first, second = reproduce(tmp_path, quick=True)
    assert (first.outcome.verdict, second.outcome.verdict) == ("fails", "erratum")
    assert "RuntimeError: no such thing" in (tmp_path / "report.html").read_text()
