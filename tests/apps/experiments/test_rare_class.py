import pytest
import torch

from qclip.apps.data import load
from qclip.apps.experiments.rare_class import RareClassRow, constant_loss, table, write_table


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_the_table_has_the_share_that_was_asked_for(tmp_path, share):
    """The standard deviation over draws is 0.0014 and 0.0046; the bound is four of them."""
    task = load(str(write_table(tmp_path / "risk.csv", share, rows=10_000)), target="event")
    targets = torch.cat([task.train.tensors[1], task.held_out.tensors[1]]).double()
    assert targets.mean().item() == pytest.approx(share, abs=4 * (share * (1 - share) / 10_000) ** 0.5)
    guess = task.train.tensors[1].double().mean()
    expected = torch.nn.functional.binary_cross_entropy(
        guess.expand(len(task.held_out)), task.held_out.tensors[1].double()
    )
    assert constant_loss(task) == pytest.approx(expected.item(), rel=1e-5)


def test_a_table_has_a_line_for_each_method():
    rows = [
        RareClassRow(data, method, loss, 0.001, 0.7, 0.98, 3.0)
        for data, method, loss in [
            ("2%", "guess", 0.1),
            ("2%", "private", 0.09),
            ("4%", "guess", 0.2),
            ("4%", "private", 0.15),
        ]
    ]
    assert table(rows).splitlines() == [
        "| loss / AUC | 2% | 4% |",
        "|---|---|---|",
        "| guess | 0.1000 / 0.700 | 0.2000 / 0.700 |",
        "| private | 0.0900 / 0.700 | 0.1500 / 0.700 |",
    ]
