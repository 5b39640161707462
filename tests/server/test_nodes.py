import pytest
from flwr.app import ConfigRecord
from toy import toy_app, toy_arrays

from flwr_hetero._flwr import NodeInfo, be_server_task
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.exchange import nodes as waiting
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.exchange.nodes import GridView, NodeBook, settled_nodes, wait_for_nodes
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import Wrapper


class Coming:
    """A real fleet of which so many nodes are online at each poll; the last number stays."""

    run = None

    def __init__(self, *counts):
        self.counts = list(counts)

    def get_node_ids(self):
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        return list(range(count))


class InMemoryGrid(Coming):
    """The same of Flower's simulation, whose ServerApp may begin before its nodes are there."""


@pytest.fixture(autouse=True)
def slept(monkeypatch):
    seconds = []
    monkeypatch.setattr(waiting.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize(
    ("counts", "found"), [((5,), 5), ((0, 0, 1, 2, 5), 5), ((0, 1, 3), 3), ((1,), 1), ((9,), 9)]
)
def test_fleet_is_counted_when_it_has_settled(counts, found, slept):
    assert len(settled_nodes(Coming(*counts), 5, settle_s=4)) == found
    assert sum(slept) <= len(counts) + 4


@pytest.mark.parametrize("kind", [Coming, InMemoryGrid])
def test_no_node_is_an_error_after_a_while(kind, slept):
    with pytest.raises(RuntimeError, match="no node is online after 7 s"):
        settled_nodes(kind(0), 5, wait_s=7)
    assert 7 <= sum(slept) < 7.2


@pytest.mark.parametrize(
    ("counts", "at_least", "found"),
    [
        ((0, 0, 0, 4), 1, 4),
        ((0, 1, 2, 8), 1, 8),  # they register one after the other: no round begins with one
        ((0, 3, 3, 3, 8), 8, 8),
        ((8, 0), 1, 8),
        ((3,), 5, 3),  # there are no others
    ],
)
def test_a_simulation_is_waited_for(counts, at_least, found, slept):
    grid = InMemoryGrid(*counts)
    assert len(wait_for_nodes(grid, at_least)) == found
    assert sum(slept) < (5 if found >= at_least else 0.1 * len(counts) + 2.2)
    assert (slept == []) == (counts[0] >= at_least)


def test_nodes_of_a_local_grid_are_not_waited_for(slept):
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 2)
    assert len(settled_nodes(grid, 5)) == 2
    assert len(wait_for_nodes(grid, 5)) == 2
    assert slept == []


def test_identities_are_claimed_once():
    registry = NodeBook()
    registry.set_partition_id(11, 3)
    registry.set_partition_id(12, 3)  # a second node with the name of the first
    registry.set_partition_id(11, 4)  # a name is kept
    assert [registry.identity(node) for node in (11, 12, 13)] == ["node-3", "id-12", "id-13"]
    assert [registry.knows(node) for node in (11, 12)] == [True, False]
    found = [registry.find(name) for name in ("node-3", "node-4", "id-12")]
    assert found == [11, None, 12]
    registry.forget(11)
    registry.set_partition_id(12, 3)
    assert registry.find("node-3") == 12
    for node in range(20, 31):
        registry.set_partition_id(node, node - 20)
    in_order = sorted([30, 21, 22], key=registry.sort_key)
    assert in_order == [21, 22, 30]  # node-1, node-2, node-10


class Registered(Coming):
    """A real fleet whose nodes have a name or a key; it counts how often its list is read."""

    num_reads = 0

    def get_nodes(self):
        self.num_reads += 1
        named = [NodeInfo(node_id=node, name=f"site-{node}") for node in self.get_node_ids()]
        return [*named, NodeInfo(node_id=9, public_key=b"key")]


def test_names_and_keys_of_all_nodes_are_read_at_once_before_any_reply():
    """So that no claim of a partition comes first."""
    grid = Registered(5)
    book = NodeBook()
    for node in range(5):
        book.learn(GridView(grid, [node]), [node])
        assert book.identity(node) == f"site-{node}"
    assert grid.num_reads == 1
    assert book.identity(9).startswith("key-")
    be_server_task(1, 1, 1)
    strategy = Wrapper()
    strategy.configure_train(1, toy_arrays(), ConfigRecord(), grid, Exchange(strategy.fleet, 1))
    assert strategy.identity(3) == "site-3"
