"""Real processes: a node names its fault in one line, and mends its app."""

import os

import pytest

from flwr_hetero_studies.faults import one_node

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk"),
]
REMEDIES = (
    "flwr supernode register",
    "copy the ca.crt",
    " s behind the SuperLink's",
    "ahead of the SuperLink's",
    "not valid yet by the clock",
    "free some space",
)


@pytest.mark.parametrize("warm", [True, False])
def test_node_that_cannot_work_says_why(tmp_path, warm):
    *refused, interrupted, terminated = one_node.starts(tmp_path, warm=warm)["faults"]
    for row, remedy in zip(refused, REMEDIES, strict=True):
        assert row["status"] != 0, row["log"]
        assert row["log"].count(remedy) == 1, row["log"]
        assert "Traceback" not in row["log"]
    assert (interrupted["status"], terminated["status"]) == (0, 0)
    # Flower's own SuperExec leaves one if it is interrupted while it starts.
    if warm:
        assert "Traceback" not in interrupted["log"] + terminated["log"]


@pytest.mark.parametrize("warm", [True, False])
def test_full_disk_costs_one_reply(tmp_path, warm):
    result = one_node.disk_full_at_install(tmp_path, warm=warm)
    assert result["survived"]
    assert result["lines"] == list(one_node.LINES)
    assert not result["history"][-1]["failures"]


def test_half_installed_app_is_mended(tmp_path):
    result = one_node.power_lost_at_install(tmp_path, warm=True)
    assert result["survived"]
    assert result["lines"] == ["a half-installed app"]
    assert not any(record["failures"] for record in result["history"])
