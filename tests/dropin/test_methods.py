"""Each method in a first Flower app, in as few changed lines as docs/dropin.md says.

What the methods do there, tests/e2e/examples sees.
"""

from pathlib import Path

import pytest
from dropin.patching import changed_lines
from e2e.examples.running import APPS, run

from flwr_hetero.fleet import DeviceProfile

HERE = Path(__file__).parent
FEW = {"rounds": 1, "num_digits": 200}
UNEQUAL = {"fleet": [DeviceProfile(4.0), DeviceProfile(0.25)] * 2, "num_digits": 1000}


@pytest.mark.parametrize(
    ("method", "most_lines", "wrapper", "size"),
    [
        ("slices", 3, "fedslice", UNEQUAL),
        ("tifl", 2, "tifl", FEW),
        ("biased", 5, "biased_local_sgd", FEW),
        ("cd_grab", 5, "cd_grab", FEW),
        ("mercury", 5, None, FEW),
        ("pgd", 5, None, FEW),
    ],
)
def test_so_many_lines_of_the_node_change(method, most_lines, wrapper, size, tmp_path):
    diff = (HERE / f"{method}.diff").read_text()
    assert changed_lines(diff, server=False) <= most_lines
    seen = run(APPS["torch"], tmp_path, diff=diff, **size)
    assert wrapper in seen.records[-1] if wrapper else seen.state(0)
    if method == "slices":
        slices_are_short_on_slow_nodes(seen.records, examples_of_fedavg=4 * 200)


def slices_are_short_on_slow_nodes(records, examples_of_fedavg):
    for record in records[2:]:  # once all four have been timed
        steps = record["local_steps"]["num_steps"]
        assert steps["node-0"] == steps["node-2"] == 10
        assert max(steps["node-1"], steps["node-3"]) <= 2
        processed = record["train"]["examples-processed"] * len(record["selected"])
        assert 0.75 * examples_of_fedavg <= processed <= 1.3 * examples_of_fedavg
    assert records[3]["train"]["train_loss"] < records[1]["train"]["train_loss"]
