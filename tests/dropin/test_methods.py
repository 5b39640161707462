"""Each method in a first Flower app, in as few changed lines as docs/dropin.md says.

What the methods do there, tests/e2e/examples sees.
"""

from pathlib import Path

import pytest
from dropin.patching import changed_lines
from e2e.examples.running import APPS, run

from flwr_hetero.fleet import DeviceProfile

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("method", "lines", "says"),
    [
        ("tifl", 2, "tifl"),
        ("biased", 5, "biased_local_sgd"),
        ("cd_grab", 5, "cd_grab"),
        ("mercury", 5, None),
        ("pgd", 5, None),
    ],
)
def test_so_many_lines_of_the_node_change(method, lines, says, tmp_path, capsys):
    diff = (HERE / f"{method}.diff").read_text()
    assert changed_lines(diff, server=False) <= lines
    seen = run(APPS["torch"], tmp_path, rounds=2, diff=diff)
    assert "accuracy" in capsys.readouterr().out
    assert says in seen.records[-1] if says else seen.state(0)


def test_slices(tmp_path):
    diff, fleet = (HERE / "slices.diff").read_text(), [DeviceProfile(4.0), DeviceProfile(0.25)] * 2
    assert changed_lines(diff, server=False) <= 3
    records = run(APPS["torch"], tmp_path, fleet=fleet, num_digits=1797, diff=diff).records
    whole = 4 * 360  # examples of a round of FedAvg
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    for record in records[2:]:  # once all four have been timed
        steps = record["local_steps"]["num_steps"]
        assert steps["node-0"] == steps["node-2"] == 10
        assert max(steps["node-1"], steps["node-3"]) <= 2
        processed = record["train"]["examples-processed"] * len(record["selected"])
        assert 0.75 * whole <= processed <= 1.3 * whole
    assert records[3]["train"]["train_loss"] < records[1]["train"]["train_loss"] < 2.4
