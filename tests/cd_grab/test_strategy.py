"""CDGraB: exact and sketched mode, faults, changing company, resume, composition."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower
from order_toy import BATCH, DIM, examples, gradient, order_app, order_arrays, visited

from flwr_hetero import keys
from flwr_hetero.cd_grab.node_order import Seen
from flwr_hetero.cd_grab.sampler import OrderedSampler
from flwr_hetero.cd_grab.wire import pack_order, write_report
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.fleet.faults import Fault
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, HerdingMeter, TiFL

QUIET = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


def fedavg():
    return flower.FedAvg(**QUIET)


def grid_of(sizes, *, profiles=None, faults=(), **options):
    profiles = profiles or [DeviceProfile()] * len(sizes)
    return LocalGrid(order_app(sizes, **options), profiles=profiles, seed=0, faults=faults)


def run(strategy, grid, rounds, dtype=np.float32):
    return strategy.start(grid, order_arrays(dtype), num_rounds=rounds)


def nodes_of(grid):
    return list(grid.get_node_ids())


def reasons(strategy):
    return [failure.reason for failure in strategy.session.info.failures]


class History:
    """Facts of each round."""

    def __init__(self, strategy):
        self.rounds, end = [], strategy.on_round_end
        strategy.on_round_end = lambda run, record: (self.rounds.append(record), end(run, record))

    def of(self, wrapper, key):
        return [record[wrapper].get(key) for record in self.rounds if record["round"]]

    def reasons(self):
        return [f["reason"] for record in self.rounds for f in record["failures"]]


# --- exact mode: Algorithms 3 and 4 ---------------------------------------------------


def algorithms_3_and_4(sizes, epochs, lr=0.02, dtype=np.float64):
    """Run parallel SGD with the order server, straight from the paper; one shared w."""
    w, orders = np.zeros(DIM, dtype), []
    units, data = [], []
    for i, size in enumerate(sizes):
        units.append(OrderedSampler(size, BATCH, seed=i).units)
        data.append(examples(i, size, loud=1))
    n, m = len(units[0]), len(sizes)
    order = [list(range(n)) for _ in sizes]
    for _ in range(epochs):
        orders.append([list(o) for o in order])
        total, slots = np.zeros(DIM, dtype), [[None] * n for _ in sizes]
        before: list[np.ndarray] = []
        for j in range(n):
            grads = []
            for i in range(m):
                chosen = units[i][order[i][j]]
                weights = np.full(len(chosen), len(chosen) * n / sizes[i])
                inputs, targets = data[i]
                step = gradient(w, inputs[chosen], targets[chosen], weights)
                grads.append(step.astype(dtype))
            if j % 2:
                for i in range(m):
                    z = before[i] - grads[i]
                    plus = np.dot(total, z) <= 0
                    total = total + z if plus else total - z
                    pair = (order[i][j - 1], order[i][j])
                    slots[i][j // 2], slots[i][n - 1 - j // 2] = pair if plus else pair[::-1]
            before = grads
            w = w - dtype(lr) * np.mean(grads, axis=0).astype(dtype)
        for i in range(m):
            order[i] = [order[i][-1] if unit is None else unit for unit in slots[i]]
    return w, orders


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [[16] * 4, [20] * 2, [14] * 3, [12]], ids=str)
def test_exact_mode_is_the_papers_algorithm(sizes, dtype):
    epochs, units = 4, sizes[0] // BATCH
    w, orders = algorithms_3_and_4(sizes, epochs, dtype=dtype)
    grid, strategy = grid_of(sizes, loud=1), CDGraB(fedavg(), mode="exact")
    history, seen = History(strategy), [[] for _ in sizes]
    end = strategy.on_replies

    def look(server_round, replies):
        for i, node in enumerate(nodes_of(grid)):
            seen[i] += visited(grid, node)
        return end(server_round, replies)

    strategy.on_replies = look
    result = run(strategy, grid, epochs * units, dtype)
    for epoch, expected in enumerate(orders):
        here = [walk[epoch * units : (epoch + 1) * units] for walk in seen]
        assert here == expected, epoch
    assert orders[-1] != orders[0]
    tolerance = 1e-4 if dtype == np.float32 else 1e-10
    np.testing.assert_allclose(result.arrays["w"].numpy(), w, rtol=tolerance)
    assert set(history.of("cd-grab", "own-share")) <= ({0.0} if len(sizes) > 1 else {0.0, 1.0})
    itemsize = np.dtype(dtype).itemsize
    assert max(history.of("cd-grab", "bytes-up")) >= len(sizes) * DIM * itemsize


# --- sketched mode --------------------------------------------------------------------


def settled_herding(method, sizes=(60,) * 6, rounds=14, loud=-1, **options):
    strategy = HerdingMeter(CDGraB(fedavg(), **options))
    history = History(strategy)
    run(strategy, grid_of(list(sizes), method=method, lr=0.001, loud=loud), rounds)
    assert history.reasons() == []
    return np.mean(history.of("herding", "herding-bound")[-4:]), history


def test_orders_of_all_nodes_go_together():
    ours, history = settled_herding("cd-grab")
    alone, _ = settled_herding("id-grab")
    random, _ = settled_herding("d-rr")
    assert ours < 0.7 * alone < 0.5 * random
    assert set(history.of("cd-grab", "pairs")) == {6 * 15}
    assert history.of("cd-grab", "pairs-together") == history.of("cd-grab", "pairs")
    first, second = history.of("cd-grab", "bytes-down")[:2]
    assert second - first == 6 * 2  # 15 signs in 2 bytes


def test_a_loud_node_makes_it_no_worse_than_each_alone():
    ours, _ = settled_herding("cd-grab", loud=3)
    alone, _ = settled_herding("id-grab", loud=3)
    assert ours < 1.02 * alone


def test_unequal_data_in_equally_many_units_are_balanced_together():
    sizes = [24, 48, 96, 120]
    _, history = settled_herding("cd-grab", sizes, rounds=2)
    assert set(history.of("cd-grab", "pairs-together")) == {0}
    _, history = settled_herding("cd-grab", sizes, rounds=2, num_units=24)
    assert set(history.of("cd-grab", "pairs-together")) == {4 * 12}


def test_a_pair_weighs_as_much_as_its_nodes_model():
    strategy, weighted = CDGraB(fedavg(), sketch_size=DIM), []
    receive = strategy.server.receive
    strategy.server.receive = lambda given: receive(weighted.extend(given) or weighted)
    run(strategy, grid_of([24, 48, 96]), 1)
    sampler, (inputs, targets) = OrderedSampler(24, BATCH, seed=0), examples(0, 24)
    grads, w = [], np.zeros(DIM)
    for _ in range(2):
        chosen, weights = sampler.next_batch()
        grads.append(gradient(w, inputs[chosen], targets[chosen], weights))
        w = w - 0.02 * grads[-1]
    length = np.linalg.norm(grads[0] - grads[1]) * 24 / np.mean([24, 48, 96])
    assert np.linalg.norm(weighted[0].diffs[0]) == pytest.approx(length, rel=1e-2)


@pytest.mark.parametrize("outside", [False, True])
def test_pairs_are_weighted_by_steps(outside):
    steps = {"fast_steps": 8, "min_steps": 2, "high_loss_fraction": None}
    if outside:
        strategy = cd_grab = CDGraB(BiasedLocalSGD(fedavg(), **steps))
    else:
        cd_grab = CDGraB(fedavg())
        strategy = BiasedLocalSGD(cd_grab, **steps)
    ratios, scale = [], cd_grab._weighted

    def spy(replies, reports):
        scaled = scale(replies, reports)
        raw = [reports[reply.metadata.src_node_id] for reply in replies]
        ratios.append([b.diffs[0][0] / a.diffs[0][0] for a, b in zip(raw, scaled, strict=True)])
        return scaled

    cd_grab._weighted = spy
    history = History(strategy)
    run(strategy, grid_of([16, 32, 24], profiles=[DeviceProfile(s) for s in (1, 1, 0.5)]), 2)
    assert list(history.of("biased-local-sgd", "num-steps")[1].values()) == [8, 8, 4]
    assert ratios[1] == pytest.approx([1.2, 1.2, 0.6])
    shares = history.rounds[2]["weights"]
    assert shares == {"node-0": 0.4, "node-1": 0.4, "node-2": 0.2}


def test_nodes_at_another_pace_walk_alone():
    profiles = [DeviceProfile()] * 3 + [DeviceProfile(compute_factor=0.3)]
    strategy = BiasedLocalSGD(CDGraB(fedavg()), fast_steps=8, high_loss_fraction=None)
    history = History(strategy)
    run(strategy, grid_of([16] * 4, profiles=profiles), 6)
    assert history.reasons() == []
    steps = strategy.round_info()["num-steps"]
    assert list(steps.values()) == [8, 8, 8, 2]
    companies = [book.company for book in strategy.inner.server.books.values()]
    assert companies == [{"node-0", "node-1", "node-2"}] * 3 + [{"node-3"}]
    assert sum(history.of("cd-grab", "pairs")) > sum(history.of("cd-grab", "pairs-together")) > 0


@pytest.mark.parametrize(
    "nest",
    [
        lambda: TiFL(CDGraB(fedavg()), 2, 2, interval=3),
        lambda: CDGraB(TiFL(flower.FedAdam(**QUIET), 3, 2, policy="uniform")),
        lambda: TiFL(BiasedLocalSGD(CDGraB(flower.FedAdam(**QUIET)), 6), 2, 2, interval=3),
        lambda: CDGraB(flower.FedMedian(**QUIET)),
        lambda: CDGraB(flower.FedAdam(**QUIET)),
        lambda: CDGraB(HerdingMeter()),
    ],
)
def test_any_nest(nest):
    strategy, profiles = nest(), [DeviceProfile(), DeviceProfile(2.0)] * 3
    history = History(strategy)
    result = run(strategy, grid_of([16] * 6, profiles=profiles), 8)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert result.arrays["w"].dtype == "float32"  # FedAdam alone gives float64
    assert sum(history.of("cd-grab", "pairs")) > 0
    assert history.reasons() == []


# --- faults ---------------------------------------------------------------------------


def test_a_node_that_lost_its_state_gets_its_order_back():
    grid, strategy = grid_of([20] * 3, lr=0.001), CDGraB(fedavg())
    history, node = History(strategy), nodes_of(grid)[1]
    orders = []
    replies = strategy.on_replies

    def spoil(server_round, given):
        orders.append(visited(grid, node))
        if server_round == 5:
            grid.context(node).state.clear()
        return replies(server_round, given)

    strategy.on_replies = spoil
    run(strategy, grid, 9)
    assert orders[5] == list(range(10))  # round 6: it begins from scratch
    book = strategy.server.books["node-1"]
    assert orders[6] != list(range(10))  # round 7: the order of round 6, had it not lost it
    assert not book.lost
    assert book.version == 8
    assert history.of("cd-grab", "pairs") == [15] * 5 + [10] + [15] * 3


@pytest.mark.parametrize("kind", ["dies", "errs", "garbage", "late"])
def test_a_reply_that_does_not_count_costs_its_node_one_pass(kind):
    fault = Fault(1, kind, 3, 4, delay_s=101.0)
    grid, strategy = grid_of([20] * 3, faults=[fault]), CDGraB(fedavg())
    history = History(strategy)
    strategy.start(grid, order_arrays(), num_rounds=8, timeout=100.0)
    assert len(history.reasons()) == 2
    assert history.of("cd-grab", "pairs") == [15, 15, 10, 10, 15, 15, 15, 15]
    versions = {name: book.version for name, book in strategy.server.books.items()}
    assert versions == {"node-0": 8, "node-1": 6, "node-2": 8}
    for i, node in enumerate(nodes_of(grid)):
        assert visited(grid, node) != strategy.server.books[f"node-{i}"].order.tolist()


def test_a_node_joins_and_a_node_without_orders_takes_part():
    sizes = [20] * 4
    grid = LocalGrid(
        order_app(sizes, ordered=lambda partition: partition != 2),
        profiles=[DeviceProfile()] * 3,
        seed=0,
    )
    strategy = CDGraB(fedavg())
    history, end = History(strategy), strategy.on_round_end

    def join(run_, record):
        if record["round"] == 3:
            grid.join(DeviceProfile())
        end(run_, record)

    strategy.on_round_end = join
    run(strategy, grid, 6)
    assert history.of("cd-grab", "pairs") == [10, 10, 10, 15, 15, 15]
    assert history.of("cd-grab", "pairs-together")[-1] == 15
    assert history.reasons() == []


def order_record(**changes):
    terms = CDGraB(sketch_size=DIM, num_units=8).terms._replace(server_round=2)
    record = write_report(terms, 8, Seen(0, 0, np.ones((4, DIM), np.float32)))
    return {k: v for k, v in (record | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({keys.SKETCH_SIZE: DIM + 1}, "numbers instead of 5"),
        ({keys.SKETCH_SIZE: 2, keys.VECTORS: bytes(16)}, "vectors of 2 numbers instead of 5"),
        ({keys.VECTORS: bytes(2 * DIM + 1)}, "whole rows of 5 float16, got 11 bytes"),
        ({keys.VECTORS: b"\xff\x7f" * DIM}, "vectors must be finite"),
        ({keys.SERVER_ROUND: 1}, "of round 1 instead of 2"),
        ({keys.SKETCH_SEED: 1}, "of sketch seed 1 instead of 0"),
        ({keys.FIRST_PAIR: 2}, "pairs 2..5 of 8 units"),
        ({keys.NUM_UNITS: 4}, "pairs 0..3 of 4 units"),
        ({keys.VERSION: -1}, "version -1 instead of a whole number"),
        ({keys.VERSION: 2**64 - 1}, "version 18446744073709551615 instead of a whole number"),
        ({keys.SCALE: "1"}, "lacks vectors"),
        ({keys.SCALE: 0.0}, "vectors must be finite"),
        ({keys.DTYPE: "int8"}, "dtype must be one of"),
    ],
)
def test_a_bad_report_drops_that_reply_and_the_run_goes_on(changes, reason):
    def liar(message, context, call_next):
        reply = call_next(message, context)
        partition = context.node_config["partition-id"]
        if partition == 1 and message.content["config"]["server-round"] == 2:
            reply.content[keys.ORDER] = ConfigRecord(order_record(**changes))
        return reply

    strategy = CDGraB(fedavg(), sketch_size=DIM, num_units=8)
    history = History(strategy)
    run(strategy, grid_of([16] * 3, mods=[liar]), 4)
    (said,) = history.reasons()
    assert reason in said
    assert history.of("cd-grab", "pairs") == [12, 8, 12, 12]


@pytest.mark.parametrize(
    "change",
    [
        {keys.WHOLE_ORDER: bytes(4 * 8), keys.FIRST_PAIR: 0},  # 0, 0, 0, ...
        {keys.WHOLE_ORDER: pack_order(range(7)), keys.FIRST_PAIR: 0},
        {keys.SIGNS: bytes(9)},
    ],
    ids=["no permutation", "too short", "too many signs"],
)
def test_an_instruction_that_makes_no_order_is_passed_over(change):
    def garble(message, context, call_next):
        third = message.content["config"]["server-round"] == 3
        if third and context.node_config["partition-id"] == 1:
            message.content[keys.ORDER].update(change)
        return call_next(message, context)

    strategy = CDGraB(fedavg(), num_units=8)
    history, grid = History(strategy), grid_of([16] * 3, mods=[garble])
    run(strategy, grid, 6)
    assert history.reasons() == []
    assert history.of("cd-grab", "pairs") == [12, 12, 8, 12, 12, 12]
    for node in nodes_of(grid):
        assert sorted(visited(grid, node)) == list(range(8))


def test_the_order_record_does_not_reach_the_inner_strategy():
    class Strict(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            assert len(replies) == 3
            for reply in replies:
                assert set(reply.content) == {"arrays", "metrics", "flwr-hetero.timing"}
            return super().aggregate_train(server_round, replies)

    run(HerdingMeter(CDGraB(Strict(**QUIET))), grid_of([16] * 3), 2)


@pytest.mark.parametrize(
    "change",
    [
        {keys.NUM_UNITS: 0},
        {keys.NUM_UNITS: "8"},
        {keys.SKETCH_SIZE: 99},
        {keys.SKETCH_SIZE: 2},
        {keys.VECTORS: bytes(3)},
        {keys.VECTORS: "text"},
        {keys.SCALE: float("nan")},
        {keys.SCALE: None},
    ],
)
def test_a_bad_herding_record_drops_that_reply(change):
    def liar(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 1:
            record = dict(reply.content[keys.HERDING]) | change
            kept = {k: v for k, v in record.items() if v is not None}
            reply.content[keys.HERDING] = ConfigRecord(kept)
        return reply

    strategy = HerdingMeter(fedavg())
    history = History(strategy)
    run(strategy, grid_of([16] * 3, method="d-rr", mods=[liar]), 2)
    assert len(history.reasons()) == 2
    assert all(bound > 0 for bound in history.of("herding", "herding-bound"))


def test_the_bound_waits_for_whole_passes():
    strategy = HerdingMeter(CDGraB(fedavg(), mode="exact"))
    history = History(strategy)
    run(strategy, grid_of([12] * 2), 12)
    bounds = [record.get("herding", {}).get("herding-bound") for record in history.rounds[1:]]
    assert [bound is not None for bound in bounds] == ([False] * 5 + [True]) * 2


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CDGraB(mode="fast"), "mode must be sketched or exact, got 'fast'"),
        (lambda: CDGraB(sketch_size=0), "sketch_size must be a whole number of at least 1, got 0"),
        (lambda: CDGraB(num_units=1), "num_units must be a whole number of at least 2, got 1"),
        (lambda: CDGraB(num_units=2**20 + 1), "num_units must be at most 1048576"),
        (lambda: CDGraB(num_units=64.5), r"num_units must be a whole number .* got 64\.5"),
        (lambda: CDGraB(sketch_size=10.5), r"sketch_size must be a whole number .* got 10\.5"),
        (lambda: CDGraB(seed=0.5), r"seed must be a whole number of at least 0, got 0\.5"),
        (lambda: CDGraB(seed=2**53 + 1), "seed must be at most 9007199254740992"),
        (lambda: CDGraB(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: CDGraB(ArrayRecord()), "strategy must be a flwr"),
        (
            lambda: HerdingMeter(sketch_size=0),
            "sketch_size must be a whole number of at least 1, got 0",
        ),
        (lambda: HerdingMeter(seed=-1), "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
