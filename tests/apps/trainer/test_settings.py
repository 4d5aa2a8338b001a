"""Settings: contradictions are refused by name, what was left out is filled in, and a resumed run keeps its own."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from qclip.apps.trainer.settings import Settings, agreed, from_public

DEFAULTS = {"batch_size": 256, "epochs": 20}
CERTIFIED = {"L": 1.0, "sigma": 1.0, "gap": 1.0}


def filled(**given):
    return Settings(**given).filled(DEFAULTS, 1000, "cpu")


REFUSED = {
    "epsilon-0": ({"epsilon": 0}, r"--epsilon = 0 must be > 0"),
    "epsilon-negative": ({"epsilon": -1.0}, r"--epsilon = -1\.0 must be > 0"),
    "epsilon-nan": ({"epsilon": float("nan")}, r"--epsilon = nan must be finite"),
    "delta-1": ({"delta": 1.0}, r"--delta = 1\.0 must be in \(0, 1\)"),
    "delta-0": ({"delta": 0.0}, r"--delta = 0\.0 must be in"),
    "noise-negative": ({"noise_multiplier": -0.5}, r"--noise-multiplier = -0\.5 must be >= 0"),
    "epsilon-and-noise": ({"epsilon": 3.0, "noise_multiplier": 1.0}, r"--noise-multiplier = 1\.0 must be left out"),
    "epochs-0": ({"epochs": 0}, r"--epochs = 0 must be >= 1"),
    "batch-0": ({"batch_size": 0}, r"--batch-size = 0 must be >= 1"),
    "physical-0": ({"physical_batch_size": 0}, r"--physical-batch-size = 0 must be >= 1"),
    "lr-0": ({"lr": 0.0}, r"--lr = 0\.0 must be > 0"),
    "seed-negative": ({"seed": -1}, r"--seed = -1 must be >= 0"),
    "tau-without-constant": ({"tau": 1.0}, r"--tau = 1\.0 must be left out without --threshold constant"),
    "constant-without-tau": ({"threshold": "constant"}, r"--threshold constant needs --tau"),
    "constant-with-p": ({"threshold": "constant", "tau": 1.0, "p": 0.5}, r"--p = 0\.5 must be left out"),
    "tau-0": ({"threshold": "constant", "tau": 0.0}, r"--tau = 0\.0 must be > 0"),
    "p-1": ({"p": 1.0}, r"--p = 1\.0 must be in \(0, 1\)"),
    "exact-with-epsilon": ({"threshold": "exact"}, r"--threshold = 'exact' is not private"),
    "rolling-with-epsilon": ({"threshold": "rolling", "epsilon": 3.0}, r"--threshold = 'rolling' is not private"),
    "half-a-certificate": ({"L": 1.0, "gap": 1.0}, r"--L was given without --sigma"),
    "q-alone": ({"q": 1.5}, r"--q was given without --L"),
    "certificate-of-adam": (CERTIFIED | {"optimizer": "adam"}, r"--optimizer = 'adam' must be sgd with --L"),
    "certificate-of-groups": (CERTIFIED | {"groups": "per-layer"}, r"--groups = 'per-layer' must be flat with --L"),
    "certificate-of-negative-L": (CERTIFIED | {"L": -1.0}, r"L = -1\.0 must be > 0"),
    "balanced-with-p": ({"threshold": "balanced", "p": 0.5}, r"--p = 0\.5 must be left out with --threshold balanced"),
    "plain-steps-without-lr": ({"plain_steps": True}, r"--plain-steps needs --lr"),
    "certificate-without-counts": (CERTIFIED | {"threshold": "constant", "tau": 1.0}, r"--threshold = 'constant' must"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        Settings(**given).check()


ACCEPTED = {
    "nothing": {},
    "noise": {"noise_multiplier": 0.0},
    "exact": {"threshold": "exact", "noise_multiplier": 0.0},
    "constant": {"threshold": "constant", "tau": 1.0, "epsilon": 1.0},
    "certificate": CERTIFIED | {"q": 1.5, "optimizer": "sgd", "groups": "flat"},
    "certificate-of-the-balanced": CERTIFIED | {"threshold": "balanced"},
}


@pytest.mark.parametrize("given", ACCEPTED.values(), ids=ACCEPTED)
def test_what_fits_together_is_accepted_filled_or_not(given):
    Settings(**given).check()
    filled(**given).check()


def test_defaults_fill_what_was_left_out_and_nothing_else():
    assert filled() == Settings(
        data="digits", epsilon=3.0, delta=1e-4, epochs=20, batch_size=256, lr=None, optimizer="sgd",
        threshold="balanced", p=None, groups="flat", device="cpu",
    )  # fmt: skip
    assert filled(noise_multiplier=0.0).epsilon is None
    assert (filled(threshold="constant", tau=1.0).p, filled(p=0.3).p) == (None, 0.3)
    assert (filled(optimizer="adam").lr, filled(optimizer="adam", lr=0.5).lr, filled(lr=0.5).lr) == (0.01, 0.5, 0.5)
    assert (filled(**CERTIFIED).q, filled(**CERTIFIED, q=1.5).q) == (2.0, 1.5)


def test_whoever_asks_for_a_quantile_gets_one():
    def threshold(**given):
        found = filled(**given)
        found.check()
        return found.threshold, found.tau, found.p

    assert threshold() == threshold(**CERTIFIED) == ("balanced", None, None)
    assert threshold(threshold="constant", tau=1.0) == ("constant", 1.0, None)
    for asked in ({"p": 0.7}, {"threshold": "private-quantile"}):
        assert threshold(**asked) == ("private-quantile", None, 0.7)
    assert threshold(threshold="geometric", p=0.9) == ("geometric", None, 0.9)


def test_the_summary_holds_all_but_the_seed():
    settings = filled(data="a.csv", data_dir=Path("x/y"), columns=("age=0:120",), write_raw_loss=True, seed=3)
    public = json.loads(json.dumps(settings.public()))
    assert "seed" not in public
    assert from_public(public) == replace(settings, seed=None)


def test_unknown_settings_of_another_version_are_refused():
    with pytest.raises(ValueError, match="unknown to this version"):
        from_public({"epsilon": 1.0, "later": True})


def parsed(command):
    return tyro.cli(Settings, args=shlex.split(command)[2:])


def test_the_command_parses_to_the_same_settings_less_the_seed():
    columns = ("age=0:120", "id=drop")
    settings = filled(data="a table.csv", target="y", columns=columns, lr=0.1234567890123, write_raw_loss=True, seed=3)
    command = settings.command()
    assert "seed" not in command
    assert parsed(command) == replace(settings, seed=None)
    without_noise = filled(noise_multiplier=0.0)
    assert parsed(without_noise.command()) == without_noise


def test_resuming_keeps_what_was_and_takes_no_contradiction():
    saved = filled(data="mnist", epsilon=8.0, data_dir=Path("here"))
    assert agreed(Settings(), saved) == saved
    assert agreed(Settings(epsilon=8.0, batch_size=256), saved) == saved
    assert agreed(Settings(data_dir=Path("there")), saved) == replace(saved, data_dir=Path("there"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 3.0}, r"--epsilon = 3\.0 must be 8\.0, the value that the run began with"),
        ({"batch_size": 128}, r"--batch-size = 128 must be 256"),
        ({"threshold": "slack"}, r"--threshold = 'slack' must be 'balanced'"),
        ({"noise_multiplier": 1.0}, r"--noise-multiplier = 1\.0 must be None"),
        ({"write_raw_loss": True}, r"--write-raw-loss = True must be False"),
        ({"noise_multiplier": 0.0}, r"--noise-multiplier = 0\.0 must be None"),
        ({"seed": 0}, r"--seed = 0 must be left out with --resume"),
        ({"columns": ("a=drop",)}, r"--columns = \('a=drop',\) must be \(\)"),
    ],
    ids=["epsilon", "batch-size", "threshold", "noise", "raw-loss", "no-noise", "seed", "columns"],
)
def test_contradictions_of_a_resumed_run_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        agreed(Settings(**given), filled(epsilon=8.0))
