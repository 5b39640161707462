import json

import pytest

from flwr_hetero.fleet import named_fleet
from flwr_hetero.fleet.processes import FleetFile, SuperNodeSpec
from flwr_hetero.fleet.real_fleet import specs_of


def test_file_survives_saving(tmp_path):
    nodes = [SuperNodeSpec("node-0", uplink_mbps=5.0), SuperNodeSpec("node-1", cpu=0.5)]
    fleet = FleetFile(port=1, database=True, superlink_pid=7, nodes=nodes)
    fleet.save(tmp_path)
    assert FleetFile.load(tmp_path) == fleet
    assert json.loads((tmp_path / "fleet.json").read_text())["nodes"][1]["cpu"] == 0.5


@pytest.mark.parametrize("text", ["{", "{}", '{"nodes": [], "ports": 1}', "[]"])
def test_unreadable_file_is_refused(tmp_path, text):
    (tmp_path / "fleet.json").write_text(text)
    with pytest.raises(ValueError, match=r"dir must hold a readable fleet\.json"):
        FleetFile.load(tmp_path)


def test_unknown_node_is_refused():
    with pytest.raises(ValueError, match=r"node must be one of \['a'\]"):
        FleetFile(port=1, nodes=[SuperNodeSpec("a")]).node("b")


@pytest.mark.parametrize("cpu", [1.0, 0.4])
def test_specs_keep_the_ratios_of_the_profiles(cpu):
    specs = specs_of(named_fleet("paper-5", 5), cpu, range(10))
    assert [spec.cpu for spec in specs] == [cpu * share for share in (1.0, 0.5, 0.25, 0.125, 0.025)]


@pytest.mark.parametrize(
    ("limits", "needed"), [({}, False), ({"cpu": 0.9}, True), ({"relay_port": 7}, True)]
)
def test_throttle_only_where_there_is_a_limit(limits, needed):
    assert FleetFile(port=1, nodes=[SuperNodeSpec("a", **limits)]).needs_throttle is needed
