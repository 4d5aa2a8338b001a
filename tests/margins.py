"""How near each numeric comparison comes to its tolerance: ``pytest --margins``.

Every `torch.testing.assert_close` that passes is measured: its largest error over what was allowed there. The summary
lists the tests that came nearest to failing, so that one sees whether another CPU's rounding could break them.
"""

import sys

import pytest
import torch

SHOWN = 15

_measured: list[float] = []


def add_option(parser):
    """The option that turns it on."""
    parser.addoption("--margins", action="store_true", help="list the comparisons that came nearest to their tolerance")


def watch(config):
    """Measure comparisons from now on, and report them at the end, if asked to."""
    if config.getoption("--margins"):
        config.pluginmanager.register(sys.modules[__name__])
        torch.testing.assert_close = measuring(torch.testing.assert_close)


def measuring(assert_close):
    """The comparison, with its ratio written down when it has passed."""

    def compare(found, expected, **options):
        __tracebackhide__ = True
        assert_close(found, expected, **options)
        if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
            _measured.append(ratio(found, expected, options.get("rtol"), options.get("atol")))

    return compare


def ratio(found, expected, rtol, atol):
    """The largest error over what is allowed; 0 where nothing but equality is."""
    if not (found.is_floating_point() and found.numel()) or found.dtype != expected.dtype:
        return 0.0
    if rtol is None or atol is None:
        rtol, atol = torch.testing._comparison.default_tolerances(found, expected)
    found, expected = found.detach().double(), expected.detach().double()
    allowed = atol + rtol * expected.abs()
    shares = torch.where(found == expected, 0.0, (found - expected).abs() / allowed)
    return float(shares.nan_to_num().max())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    _measured.clear()
    try:
        return (yield)
    finally:
        if _measured:
            item.user_properties.append(("margin", max(_measured)))


def pytest_terminal_summary(terminalreporter, config):
    margins = [
        (value, report.nodeid)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "margin" and report.when == "call" and "test_compare.py" not in report.nodeid  # near on purpose
    ]
    terminalreporter.section("nearest to their tolerance (1 would fail)")
    for value, test in sorted(margins, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{value:.3f}  {test}")
    terminalreporter.write_line(f"of {len(margins)} tests with numeric comparisons")
