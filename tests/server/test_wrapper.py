import copy
import pickle

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from recording import History
from toy import FLOWER_STRATEGIES, toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.fleet.faults import CORRUPTIONS
from flwr_hetero.strategy import LocalSteps, Wrapper

EVERY_FAULT = [
    *(Fault(i, "garbage", 2, 2, corrupt=corrupt) for i, corrupt in enumerate(sorted(CORRUPTIONS))),
    Fault(0, "dies", 3, 3),
    Fault(1, "errs", 3, 3),
    Fault(2, "late", 3, 3, delay_s=3_600, message_type="train"),
]


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_no_fault_stops_a_run(name):
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 14), faults=EVERY_FAULT)
    history = History(FLOWER_STRATEGIES[name]())
    result = history.start(grid, toy_arrays(buffer=name != "QFedAvg"), num_rounds=4)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert {array.dtype for array in result.arrays.values()} <= {"float32", "int64"}
    failures = [len(record["failures"]) for record in history.records[1:]]
    assert failures[0] == failures[3] == 0
    assert (failures[1] >= len(CORRUPTIONS), failures[2] >= 3) == (True, True)


def run(strategy, nodes=3, rounds=1, faults=(), **settings):
    grid = LocalGrid(toy_app(), [DeviceProfile()] * nodes, faults=faults)
    return strategy.start(grid, toy_arrays(), rounds, **settings)


def test_each_instruction_has_its_own_records():
    class PerNode(Wrapper):
        def on_instructions(self, context, messages, grid):
            for message in messages:
                message.content["config"]["me"] = message.metadata.dst_node_id
            self.seen = [(m.metadata.dst_node_id, m.content["config"]["me"]) for m in messages]
            return messages

    config = ConfigRecord({"lr": 0.1})
    wrapper = PerNode()
    run(wrapper, train_config=config)
    assert all(node == me for node, me in wrapper.seen)
    assert "me" not in config
    Wrapper(wrapper)
    with pytest.raises(ValueError, match="wrapped only once"):
        Wrapper(wrapper)


class Outcomes(Wrapper):
    def __init__(self, strategy=None, drops=()):
        super().__init__(strategy)
        self.drops = drops
        self.seen = []

    def on_replies(self, context, replies):
        return [r for r in replies if self.identity(r.metadata.src_node_id) not in self.drops]

    def on_train_end(self, context, good, failed):
        self.seen.append(("train", context.round, good, sorted(failed)))

    def on_evaluate_end(self, context, good, failed):
        self.seen.append(("evaluate", context.round, good, failed))


def test_outcome_counts_after_all_wrappers():
    class Strict(Wrapper):
        def on_replies(self, context, replies):
            context.fail(replies[-1].metadata.src_node_id, "out of principle")
            return replies[:-1]

    faults = [Fault(1, "errs", 1, 1, message_type="train"), Fault(2, "errs", 1, 1)]
    outer = Outcomes(Outcomes(Strict(), drops=["node-0"]))
    run(outer, 5, faults=faults)
    assert outer.seen == outer.inner.seen
    train, evaluate = outer.seen
    assert train == ("train", 1, ["node-3"], ["id-1001", "id-1002", "node-4"])
    assert evaluate == ("evaluate", 1, ["node-0", "node-1", "node-3", "node-4"], ["id-1002"])


class ByNode(Wrapper):
    """Weight models by 1, 2, ..."""

    def weights(self, context, replies):
        return [1.0 + i for i in range(len(replies))]


@pytest.mark.parametrize("inner", [flower.FedAvg, lambda: Wrapper(flower.MultiKrum())])
@pytest.mark.parametrize("outside", [False, True])
def test_outermost_weights_are_the_ones(inner, outside):
    history = History(ByNode(Wrapper(inner())) if outside else Wrapper(ByNode(inner())))
    history.update_limit = None
    result = run(history)
    shares = {f"node-{i}": pytest.approx((1 + i) / 6) for i in range(3)}
    assert history.records[1]["weights"] == shares
    assert history.records[0]["weights"] == {}
    if inner is flower.FedAvg:
        assert result.arrays["w"].numpy() == pytest.approx((0 * 1 + 1.01 * 2 + 2.04 * 3) / 6 / 2)
        assert result.train_metrics_clientapp[1]["train-loss"] == pytest.approx(5.1817 / 3)
    assert set(result.train_metrics_clientapp[1]) == {"train-loss"}


class WithFolder(flower.FedAvg):
    """A strategy of a user's own."""

    folder = None

    def set_folder(self, folder):
        self.folder = folder
        return self


PRIVATE = flower.DifferentialPrivacyServerSideFixedClipping
NESTS = {
    "alone": lambda own: Wrapper(own),
    "in others": lambda own: Wrapper(LocalSteps(own)),
    "with privacy": lambda own: LocalSteps(PRIVATE(own, 0.1, 1.0, 3)),
}
WAYS = [lambda s: s, copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_methods_and_attributes_of_the_wrapped_strategy(nest, way):
    strategy = way(nest(WithFolder(fraction_train=0.5)))
    assert strategy.set_folder("results").folder == strategy.folder == "results"
    assert strategy.fraction_train == 0.5
    names = " > ".join(type(each).__name__ for each in strategy.chain())
    with pytest.raises(AttributeError, match=r"call its start\(grid, arrays\) in a function"):
        _ = strategy.initialize_parameters
    with pytest.raises(AttributeError, match=f"'set_foldr' is no attribute .* in {names}$"):
        strategy.set_foldr("results")


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_a_start_of_its_own_is_refused(nest):
    class WithStart(flower.FedAvg):
        def start(self, *args, **kwargs):
            return super().start(*args, **kwargs)

    rule = "strategy must leave start to the wrapper, got 'Derived.start': .*evaluate_fn"
    with pytest.raises(ValueError, match=rule):
        nest(type("Derived", (WithStart,), {})())
