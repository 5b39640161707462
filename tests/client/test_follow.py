import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import StepLoader, follow, load_state, timing
from flwr_hetero.sampler import InTurn, MercurySampler, OrderedSampler, SampledLoss, TopLossSampler
from flwr_hetero.strategy import CDGraB, Wrapper

NUM, BATCH = 24, 3


def data_of(node: int) -> TensorDataset:
    seed = torch.Generator().manual_seed(node)
    return TensorDataset(torch.randn(NUM, 4, generator=seed), torch.arange(NUM) % 3)


def order_app(*, mods=(timing,), workers=0, observed=True, explicit=False, turn=False, orders=None):
    """Make a ClientApp with CD-GraB's node half, in a loop over epochs."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        data = data_of(context.node_config["partition-id"])
        model = nn.Linear(4, 3)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        sampler = ordered = OrderedSampler(len(data), BATCH)
        if turn:
            sampler = InTurn([ordered, MercurySampler(len(data), BATCH)])
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
        order = follow(sampler, msg, context, model)
        if orders is not None:
            orders.setdefault(context.node_id, []).append(ordered.node_order.next_order.tolist())
        loader = StepLoader(loader, msg)
        criterion = SampledLoss(sampler) if observed else nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
        arrays = ArrayRecord(model.state_dict())
        metrics = MetricRecord({"num-examples": len(data), **loader.metrics})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        if explicit:
            content.update(order.records)
        return Message(content, reply_to=msg)

    return app


def run_orders(app, strategy=None, rounds=6, **config):
    """Run some rounds; return what CD-GraB says of each, and the grid."""
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = strategy(inner) if strategy else CDGraB(inner, sketch_size=64)
    lines = []
    strategy.on_round_end = lambda run, record: lines.append(record)
    grid = LocalGrid(app, [DeviceProfile()] * 3)
    torch.manual_seed(0)
    arrays = ArrayRecord(nn.Linear(4, 3).state_dict())
    strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord(config))
    return lines, grid


def balanced(lines) -> int:
    return sum(line["cd_grab"]["pairs"] for line in lines if line["round"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [None, 3])
def test_orders_follow_the_gradients(workers, steps):
    orders = {}
    config = {} if steps is None else {"num-steps": steps}
    rounds = 8 if steps else 4
    lines, _ = run_orders(order_app(workers=workers, orders=orders), rounds=rounds, **config)
    assert not any(line["failures"] for line in lines)
    assert balanced(lines) >= 3 * 4
    for changes in orders.values():
        assert len({tuple(order) for order in changes}) > 1
        assert all(sorted(order) == list(range(NUM // BATCH)) for order in changes)


def test_workers_change_nothing():
    runs = [{}, {}]
    for workers, orders in zip((0, 2), runs, strict=True):
        app = order_app(workers=workers, orders=orders)
        run_orders(app, rounds=6, **{"num-steps": 5})
    assert runs[0] == runs[1]


def test_the_answer_may_be_added_by_hand():
    by_mod, by_hand, neither = (
        run_orders(order_app(mods=mods, explicit=explicit), rounds=3)[0]
        for mods, explicit in (((timing,), False), ((), True), ((timing,), True))
    )
    assert balanced(by_mod) == balanced(by_hand) == balanced(neither) > 0


def test_an_order_in_turn_with_importance():
    orders = {}
    lines, grid = run_orders(order_app(turn=True, orders=orders), rounds=8)
    assert balanced(lines) > 0
    assert all(len({tuple(order) for order in each}) > 1 for each in orders.values())
    state = load_state(grid.context(next(iter(grid.get_node_ids()))), "sampler")
    assert np.ptp(state["1.importance"]) > 0


@pytest.mark.parametrize("turn", [False, True])
def test_gradients_that_do_not_come_are_an_error(turn):
    lines, _ = run_orders(order_app(observed=False, turn=turn), rounds=1)
    for failure in lines[-1]["failures"]:
        assert "OrderedSampler learns nothing: no gradient was observed" in failure["reason"]
        assert "follow(loader.batch_sampler, msg, context, model)" in failure["reason"]
    assert len(lines[-1]["failures"]) == 3


def test_without_an_order_server_gradients_may_be_missing():
    lines, _ = run_orders(order_app(observed=False), Wrapper, rounds=1)
    assert not lines[-1]["failures"]


# --- arguments and roles -----------------------------------------------------------------


@pytest.fixture
def ask():
    """Give a function that makes an instruction."""
    LocalGrid(ClientApp(), [DeviceProfile()])  # so that messages can be made
    return lambda **records: Message(
        RecordDict({name: ConfigRecord(record) for name, record in records.items()}), 1, "train"
    )


@pytest.fixture
def context():
    return Context(1, 1, {}, RecordDict(), {})


def test_top_loss_takes_its_role(ask, context):
    role = {keys.FAST: True, keys.FAST_SHARE: 0.25, keys.HIGH_LOSS_FRACTION: 0.75}
    sampler = TopLossSampler(20, 5)
    follow(sampler, ask(config={"lr": 0.1}, more=role), context)
    assert (sampler.fast, sampler.share, sampler.high_loss_fraction) == (True, 0.25, 0.75)
    assert len(sampler) == 1
    follow(InTurn([sampler]), ask(config={"lr": 0.1}), context, name="turns")
    assert not sampler.fast
    with pytest.raises(ValueError, match="share must be a number in"):
        follow(sampler, ask(config={keys.FAST: True, keys.FAST_SHARE: 2.0}), context)


@pytest.mark.parametrize("method", ["cd-grab", "id-grab"])
def test_an_order_needs_the_model(ask, context, method):
    with pytest.raises(ValueError, match="model must be the model whose gradients"):
        follow(OrderedSampler(12, 2, method=method), ask(), context)
    follow(OrderedSampler(12, 2, method="d-rr"), ask(), context)


def test_bad_arguments_are_refused(ask, context):
    with pytest.raises(ValueError, match="msg must be the message"):
        follow(OrderedSampler(12, 2), context, context, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="sampler must be a sampler of"):
        follow(DataLoader(data_of(0)), ask(), context)


# --- state without a mod -------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [3, NUM // BATCH])
def test_the_answer_by_hand_keeps_the_state(steps, workers, ask, context):
    sampler, model = OrderedSampler(NUM, BATCH), nn.Linear(4, 3)
    following = follow(sampler, ask(), context, model)
    batches = iter(DataLoader(data_of(0), batch_sampler=sampler, num_workers=workers))
    criterion = SampledLoss(sampler)
    for _ in range(steps):
        inputs, targets = next(batches)
        criterion(model(inputs), targets).backward()
    assert following.records == {}
    kept = load_state(context, "sampler")
    assert kept is not None
    for key, value in sampler.state_dict().items():
        np.testing.assert_array_equal(kept[key], value)
    assert kept["order.position"] == steps


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_gradient_of_a_pass_is_kept(workers, ask, context):
    sampler, model = OrderedSampler(NUM, BATCH), nn.Linear(4, 3)
    follow(sampler, ask(), context, model)
    criterion = SampledLoss(sampler)
    for inputs, targets in DataLoader(data_of(0), batch_sampler=sampler, num_workers=workers):
        criterion(model(inputs), targets).backward()
    assert len(load_state(context, "sampler")["order.diffs"]) == NUM // BATCH // 2
