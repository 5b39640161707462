"""FedSlice: equal work a round, and all that a user of FedAvg sees."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedXgbBagging,
    Krum,
)
from recording import History

from flwr_hetero.biased_local_sgd.strategy import MeasuredSteps
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.strategy import FedSlice, ModelAverage, TiFL, Wrapper
from flwr_hetero_studies.advise.task import run_config, small_task

NODES, EXAMPLES = 12, 96
TASK, CONFIG = small_task(NODES, EXAMPLES), dict(run_config())


class Metered(LocalGrid):
    """Keep what was asked for in training, and what came of it."""

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        replies = [(m, self.pending[m.metadata.message_id].reply) for m in messages]
        train = [(m, r) for m, r in replies if m.metadata.message_type == "train"]
        self.jobs = [*getattr(self, "jobs", []), *(each for each in train if each[1].has_content())]
        return ids

    @property
    def examples(self):
        return sum(reply.content["metrics"]["examples-processed"] for _, reply in self.jobs)


def quiet(**settings):
    return FedAvg(fraction_evaluate=0.0, **settings)


def values_of(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


def accuracy(number, arrays):
    return MetricRecord({"accuracy": TASK.measure(values_of(arrays), [0])[0]})


def run(strategy, num_rounds, profiles=None, **how):
    grid = Metered(TASK.app, profiles or named_fleet("paper-5", NODES), seed=1, run_config=CONFIG)
    seen = History(strategy)
    result = seen.start(grid, TASK.first(), num_rounds, evaluate_fn=accuracy, **how)
    return grid, seen.records, result


@pytest.mark.parametrize(("num_rounds", "in_flight"), [(3, None), (3, 3), (12, 5)])
def test_as_many_rounds_train_on_as_many_examples_as_fedavg(num_rounds, in_flight):
    grid, records, _ = run(FedSlice(quiet(), concurrency=in_flight), num_rounds)
    per_round = NODES * EXAMPLES if in_flight is None else in_flight * EXAMPLES
    assert grid.examples == pytest.approx(num_rounds * per_round, rel=0.2)
    assert [record["round"] for record in records] == list(range(num_rounds + 1))
    assert all(r["fedslice"]["examples"] >= r["fedslice"]["examples_wanted"] for r in records[1:])


@pytest.mark.parametrize("limit", [pytest.param(4.0, marks=pytest.mark.nightly), None])
def test_the_history_says_what_the_bound_on_lengths_cuts(limit):
    """FedSlice's own bound is not the limit on updates, which a user may lift."""
    strategy = FedSlice(quiet())
    strategy.update_limit = limit
    _, records, _ = run(strategy, 3)
    for record in records[1:]:
        assert len(record["fedbuff"]["bounded_share"]) == record["fedslice"]["updates"]
    cut = [share for record in records[1:] for share in record["fedbuff"]["bounded_share"]]
    assert all(0 <= share < 1 for share in cut)
    assert any(cut)


def test_slices_are_sized_by_what_a_message_costs():
    costs = {"wait_s": 0.1, "start_s": 0.2}
    fleet = [replace(each, **costs) for each in named_fleet("paper-5", NODES)]
    speeds = (strategy := FedSlice(quiet())).steps.speeds
    run(strategy, 4, fleet)
    by_node = {f"node-{i}": each for i, each in enumerate(fleet)}
    fixed_s = {node: 0.1 + 0.2 / each.compute_factor for node, each in by_node.items()}
    assert speeds.link_s == pytest.approx(fixed_s, abs=1e-5)
    step_s = {node: 8 * 0.01 / each.compute_factor for node, each in by_node.items()}
    assert speeds.step_s == pytest.approx(step_s)
    # four times the fixed cost, but no more than the job in FedAvg
    limits = {n: min(speeds.jobs[n].steps, 4 * fixed_s[n] / step_s[n] + 1e-6) for n in by_node}
    assert strategy.steps.num_steps([*by_node]).tolist() == [int(n) for n in limits.values()]
    assert 4 * fixed_s["node-11"] / step_s["node-11"] < speeds.jobs["node-11"].steps


@pytest.mark.parametrize(
    ("num_rounds", "num_seeds"), [(6, 1), pytest.param(12, 3, marks=pytest.mark.nightly)]
)
def test_it_ends_as_good_as_fedavg_in_a_fraction_of_the_time(num_rounds, num_seeds):
    behind = []
    for seed in range(num_seeds):
        task = small_task(NODES, EXAMPLES, seed=seed)
        ends = []
        for strategy in (FedSlice(quiet()), Wrapper(quiet())):
            grid = LocalGrid(task.app, named_fleet("paper-5", NODES), seed=seed, run_config=CONFIG)
            arrays = strategy.start(grid, task.first(), num_rounds).arrays
            ends.append((grid.virtual_time_s, task.measure(values_of(arrays), [0])[0]))
        (ours_s, found), (base_s, usual) = ends
        assert ours_s < base_s / 8
        behind.append(usual - found)
    assert np.mean(behind) < 0.01


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_equal_nodes_bear_fedavgs_learning_rate(seed):
    """Their updates start from about the same model: unbounded, the sum of them overshoots."""
    task = small_task(NODES, EXAMPLES, seed=seed)
    config = CONFIG | {"learning-rate": 0.6}

    def first_round(strategy):
        grid = LocalGrid(task.app, [DeviceProfile()] * NODES, seed=seed, run_config=config)
        arrays = strategy.start(grid, task.first(), 1).arrays
        return task.measure(values_of(arrays), [0])[0]

    assert first_round(FedSlice(quiet())) > first_round(Wrapper(quiet())) - 0.02


@pytest.mark.parametrize(("nodes", "part"), [(2, 1.0), (8, 0.25)])
def test_all_in_flight_take_one_step_of_an_adaptive_server(nodes, part):
    steps = []

    class Seen(FedAdam):
        def aggregate_train(self, server_round, replies):
            steps.append(self.eta)
            return super().aggregate_train(server_round, replies)

    leaf = Seen(fraction_evaluate=0.0, eta=0.01)
    # of alike nodes a server update has all that come at about the same time
    run(FedSlice(leaf), 2, [DeviceProfile(speed) for speed in np.geomspace(1, 2, nodes)])
    assert steps
    assert steps == pytest.approx([0.01 * part] * len(steps))
    assert leaf.eta == 0.01


@pytest.mark.parametrize(("inner", "part"), [(FedAvg, 0.5), (FedAdam, 0.0)])
def test_nodes_train_from_half_way_to_the_average(inner, part):
    sent = []

    class Seen(FedSlice):
        def on_instructions(self, context, messages, grid):
            name, array = next(iter(context.arrays.items()))
            average = self.parts[0].average.get(name)
            if average is not None:
                newest = array.numpy()
                own = [m.content["arrays"][name].numpy() for m in messages]
                sent.extend((newest + part * (average - newest), each) for each in own)
            return messages

    run(Seen(inner(fraction_evaluate=0.0), concurrency=5), 2)
    assert len(sent) > 5
    for expected, found in sent:
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_every_round_has_one_line_one_evaluation_and_one_on_nodes():
    _, records, result = run(FedSlice(), 3)
    assert len(records) == 4
    assert sorted(result.evaluate_metrics_serverapp) == list(range(4))
    assert sorted(result.evaluate_metrics_clientapp) == list(range(1, 4))
    assert sorted(result.train_metrics_clientapp) == list(range(1, 4))
    for record in records[1:]:
        assert record["fedslice"]["updates"] > 1
        assert len(record["fedbuff"]["nodes"]) == len(record["fedbuff"]["staleness"])
        assert len(record["fedbuff"]["nodes"]) >= 2 * record["fedslice"]["updates"]
        assert sum(record["weights"].values()) == pytest.approx(1)
        assert set(record["local_steps"]["num_steps"]) == set(record["fedbuff"]["nodes"])


def test_a_loop_of_single_rounds_with_evaluation_takes_little_longer():
    """While the nodes evaluate, which takes as long as the slowest one trains, others train on."""
    grid = Metered(TASK.app, named_fleet("paper-5", NODES), seed=1, run_config=CONFIG)
    strategy = FedSlice(FedAvg(fraction_evaluate=1.0))
    arrays = TASK.first()
    for _ in range(4):
        result = strategy.start(grid, arrays, 1, evaluate_fn=accuracy)
        arrays = result.arrays
        # What is returned is what was evaluated, although training has gone on.
        found = result.evaluate_metrics_serverapp[1]["accuracy"]
        assert found == accuracy(1, arrays)["accuracy"]
        assert len(result.evaluate_metrics_clientapp[1])
    whole, _, other = run(FedSlice(FedAvg(fraction_evaluate=1.0)), 4)
    assert grid.virtual_time_s < 1.4 * whole.virtual_time_s
    assert found == pytest.approx(other.evaluate_metrics_serverapp[4]["accuracy"], abs=0.03)


def test_other_arrays_begin_a_new_run():
    grid = Metered(TASK.app, named_fleet("paper-5", NODES), seed=1, run_config=CONFIG)
    strategy = FedSlice(quiet())
    strategy.start(grid, TASK.first(), 2)
    result = strategy.start(grid, TASK.first(), 1, evaluate_fn=accuracy)
    assert result.evaluate_metrics_serverapp[0]["accuracy"] == accuracy(0, TASK.first())["accuracy"]
    assert strategy.rule.engine.version < 20


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: FedSlice(slice_steps=0), "slice_steps must be .* got 0"),
        (lambda: FedSlice(rate_correction=1.5), r"rate_correction must be .*\[0, 1\], got 1.5"),
        (lambda: FedSlice(total_rounds=0), "total_rounds must be"),
        (lambda: FedSlice(window=0), "window must be"),
        (lambda: FedSlice(keep_optimizer=1), "keep_optimizer must be one of True, False, got 1"),
        (lambda: FedSlice(concurrency=0), "concurrency must be"),
        (lambda: FedSlice(TiFL()), "leave selection to FedSlice"),
        (lambda: FedSlice(ModelAverage()), "leave the evaluated model to FedSlice"),
        (lambda: FedSlice(FedAvg(fraction_train=0.5)), "concurrency"),
        (lambda: FedSlice(FedXgbBagging()), "FedXgbBagging"),
        (lambda: FedSlice(FedAvgM(server_momentum=1.0)), r"server_momentum must be .*\[0, 1\)"),
        (lambda: FedSlice(Krum(num_malicious_nodes=1), concurrency=5), "at least 20 around Krum"),
        (lambda: FedSlice(clipping()), "rate_correction must"),
    ],
)
def test_bad_arguments_are_refused_before_training(build, text):
    with pytest.raises(ValueError, match=text):
        build()


def clipping():
    return DifferentialPrivacyClientSideFixedClipping(quiet(), 0.1, 1.0, 3)


def test_it_takes_other_strategies_and_privacy_without_scaling():
    lr = ConfigRecord({"lr": 0.5})
    strategy = FedSlice(FedAdam(fraction_evaluate=0.0), concurrency=4)
    grid, *_ = run(strategy, 2, train_config=lr, timeout=100.0)
    assert {message.content["config"]["lr"] for message, _ in grid.jobs} == {0.5}
    assert FedSlice(clipping(), rate_correction=0.0) is not None


def test_state_goes_on_where_it_was():
    run(first := FedSlice(quiet(), concurrency=3), 4)
    second = FedSlice(quiet(), concurrency=3)
    for old, new in zip(first.wrappers(), second.wrappers(), strict=True):
        new.load_state_dict(old.state_dict())
    assert second.rule.examples == first.rule.examples
    assert second.steps.speeds.jobs == first.steps.speeds.jobs
    steps = first.steps.num_steps(["node-0", "node-9", "unknown"])
    assert second.steps.num_steps(["node-0", "node-9", "unknown"]).tolist() == steps.tolist()


def test_the_next_slice_of_a_node_follows_its_last_reply(monkeypatch):
    """Slices are kept until a node replies; those of the others, which set the time, stay."""
    steps = FedSlice(quiet()).steps
    for number in range(9):
        steps.speeds.observe(f"id-{number}", 10, compute_s=1.0, link_s=0.0)
    assert steps.num_steps(["id-7", "id-8"]).tolist() == [10, 10]
    assert steps.slices_s(["id-7"]).tolist() == [1.0]

    def learn(self, context, replies):
        self.speeds.observe("id-7", 10, compute_s=10.0, link_s=0.0)
        return replies

    monkeypatch.setattr(MeasuredSteps, "on_replies", learn)
    steps.on_replies(None, [SimpleNamespace(metadata=SimpleNamespace(src_node_id=7))])
    assert steps.num_steps(["id-7", "id-8"]).tolist() == [1, 10]
    assert steps.slices_s(["id-7"]).tolist() == [0.55]
