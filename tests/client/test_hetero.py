"""The node's half: what it reports, local epochs, samplers, code without a loader."""

from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.client import work as work_module
from flwr_hetero.client.handler import _said, current_handler
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import follow, hetero, keep, load_state
from flwr_hetero.older import OlderClients
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
    UniformSampler,
    WeightedLoss,
)
from flwr_hetero.strategy import LocalSteps

NUM, BATCH = 24, 4
FULL = NUM // BATCH
DATA = TensorDataset(torch.randn(NUM, 3, generator=torch.manual_seed(0)), torch.arange(NUM) % 2)


def plain():
    return DataLoader(DATA, BATCH, shuffle=True)


class Node:
    """A node that answers with what a function of message and context does."""

    def __init__(self, function, kinds=("train",), mods=(hetero,), profile=None, **run_config):
        self.function, self.results = function, []
        app = ClientApp(mods=list(mods))
        for kind in kinds:
            getattr(app, kind)()(self.answer)
        self.grid = LocalGrid(app, [profile or DeviceProfile()], run_config=run_config)
        (self.id,) = self.grid.get_node_ids()

    def answer(self, msg, context):
        self.results.append(self.function(msg, context))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": NUM})}), reply_to=msg)

    def ask(self, steps=None, kind="train", **records):
        config = ConfigRecord({} if steps is None else {"num-steps": steps})
        content = RecordDict({"config": config, **records})
        (reply,) = self.grid.send_and_receive([Message(content, self.id, kind)])
        return reply

    def work(self, steps=None):
        reply = self.ask(steps)
        assert not reply.has_error(), reply.error.reason
        found = dict(reply.content.config_records.get(keys.WORK, {}))
        return {key: found[key] for key in found if key != keys.STEP_TIME}

    def state(self, name="sampler"):
        return load_state(self.grid.context(self.id), name)


def loop(epochs=1, given=lambda *_: None):
    """Make an app's loop over epochs; it returns the lengths of its passes."""

    def train(msg, context):
        loader = hetero.batches(plain(), msg)
        passes = [len(list(loader)) for _ in range(epochs)]
        given(passes, len(loader))
        return passes

    return train


def report(steps, passes, job, size=BATCH):
    found = {"num-steps": steps, "passes": passes, "job-steps": job}
    return found | ({"examples-processed": steps * size} if size else {})


# --- what the reply says ------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "taken"), [(2, 2), (20, 20), (None, FULL)])
def test_the_reply_says_what_was_done(steps, taken):
    assert Node(loop()).work(steps) == report(taken, 1, FULL)


def test_job_is_what_the_app_would_have_done_unasked():
    node = Node(loop(epochs=3), **{"local-epochs": 3})
    assert node.work(6) == report(6, 3, 3 * FULL)
    assert node.work() == report(3 * FULL, 3, 3 * FULL)


def test_what_is_not_known_is_left_out():
    class Endless:
        def __iter__(self):
            while True:
                yield "a b c"

    node = Node(lambda msg, _: list(hetero.batches(Endless(), msg)))
    assert node.work(3) == {"num-steps": 3, "passes": 1}
    node = Node(lambda msg, _: list(hetero.batches(iter("abc"), msg)))
    assert node.work() == {"num-steps": 3, "passes": 1, "job-steps": 3}


def test_without_a_loop_nothing_is_said():
    assert Node(lambda msg, _: None).work(3) == {}
    assert Node(lambda msg, _: hetero.batches(plain(), msg)).work(3) == {}


def test_evaluation_says_and_moves_nothing():
    node = Node(loop(), kinds=("train", "evaluate", "query"))
    node.ask(2)
    before = dict(node.grid.context(node.id).state[keys.PASS])
    for kind in ("evaluate", "query"):
        assert keys.WORK not in node.ask(kind=kind).content
    assert dict(node.grid.context(node.id).state[keys.PASS]) == before


@pytest.mark.parametrize(("steps", "seconds"), [(1, 9.0), (4, 2.0)])
def test_a_step_takes_what_the_clock_says_without_the_first(steps, seconds, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train(msg, context):
        for number, _ in enumerate(hetero.batches(plain(), msg)):
            now[0] += 2.0 if number else 9.0
        now[0] += 100.0  # evaluates its model
        handler.append(current_handler().work.finish()[keys.WORK][keys.STEP_TIME])

    handler = []
    Node(train).ask(steps)
    assert handler == [seconds]


def test_an_emulated_device_has_its_own_clock():
    profile = DeviceProfile(0.5, seconds_per_example=0.1)
    record = Node(loop(), profile=profile).ask(3).content[keys.WORK]
    assert record[keys.STEP_TIME] == pytest.approx(BATCH * 0.1 / 0.5)
    assert record["examples-processed"] == 3 * BATCH


def test_an_emulated_device_works_for_the_examples_processed():
    times = [Node(loop()).ask(steps).content[keys.TIMING][keys.TRAIN_TIME] for steps in (2, 6)]
    assert times == pytest.approx([2 * BATCH * 0.01, 6 * BATCH * 0.01])


# --- local epochs -------------------------------------------------------------------------------


def test_epochs_of_the_run_config_share_the_steps(caplog):
    _said.clear()
    lengths = []
    node = Node(
        loop(3, lambda passes, length: lengths.append((passes, length))), **{"local-epochs": 3}
    )
    for steps in (7, 3, 2):
        node.ask(steps)
    assert lengths == [([2, 2, 2], 2), ([1, 1, 1], 1), ([1, 1, 1], 1)]
    said = [record.message for record in caplog.records if "local epochs" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "two", 10**9])
def test_a_run_config_that_says_no_number_is_one_pass(wrong):
    node = Node(loop(), **{"local-epochs": wrong})
    assert node.work(6) == report(6, 1, FULL)


def test_the_last_message_says_how_many_passes_an_app_makes():
    node = Node(loop(2), **{"local-epochs": 5})
    assert node.work(10) == report(4, 2, 2 * FULL)  # 5 were planned, 2 came
    assert node.work(10) == report(10, 2, 2 * FULL)


def test_passes_that_were_not_planned_give_nothing():
    node = Node(loop(3))
    node.ask(6)
    assert node.results == [[6, 0, 0]]
    node.ask(6)
    assert node.results[1] == [2, 2, 2]


def test_a_look_at_a_batch_is_no_pass():
    def train(msg, context):
        loader = hetero.batches(plain(), msg)
        next(iter(loader))
        return [len(list(loader)) for _ in range(2)]

    node = Node(train)
    for _ in range(2):
        node.ask(9)
    assert node.results == [[8, 0], [4, 3]]
    assert node.work()["passes"] == 2


def test_an_app_that_breaks_off_its_passes():
    def train(msg, context):
        loader, taken = hetero.batches(plain(), msg), []
        for _ in range(3):
            for number, _ in enumerate(loader, 1):
                if number == 2:
                    break
            taken.append(number)
        return taken

    node = Node(train)
    assert node.work(20) == report(6, 1, FULL)
    assert node.work() == report(6, 1, 6)


def test_a_loader_for_each_epoch_is_the_same():
    def train(msg, context):
        return [len(list(hetero.batches(plain(), msg))) for _ in range(2)]

    node = Node(train, **{"local-epochs": 2})
    assert node.work(8) == report(8, 2, 2 * FULL)
    assert node.results == [[4, 4]]


def test_epochs_go_on_in_one_pass_over_the_data():
    seen = []

    def train(msg, context):
        loader = hetero.batches(DataLoader(range(NUM), BATCH, shuffle=True), msg)
        for _ in range(2):
            seen.extend(number for batch in loader for number in batch.tolist())

    node = Node(train, **{"local-epochs": 2})
    for _ in range(3):
        node.ask(4)
    assert sorted(seen[:NUM]) == sorted(seen[NUM:]) == list(range(NUM))


@pytest.mark.parametrize("asked", [None, 4, 9])
def test_the_loss_that_apps_report_is_right(asked):
    losses = []

    def train(msg, context):
        loader, total = hetero.batches(plain(), msg), 0.0
        for _ in range(3):
            for _ in loader:
                total += 2.5
        losses.append(total / (3 * len(loader)))

    Node(train, **{"local-epochs": 3}).ask(asked)
    assert losses == [2.5]


# --- samplers -----------------------------------------------------------------------------------


def train_with(sampler=None, epochs=1, batches=hetero.batches, loader=plain, done=None, **how):
    """Make a training function whose batches a sampler draws."""

    def train(msg, context):
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        more = {"model": model} if how.get("gives_model") else {}
        steps = batches(loader(), msg, **({"sampler": sampler} if sampler else {}), **more)
        criterion = steps.criterion(how.get("loss_fn"))
        for _ in range(epochs):
            for inputs, targets in steps:
                criterion(model(inputs), targets).backward()
        if done is not None:
            done.append((steps.batch_sampler, criterion))
        return steps.batch_sampler

    return train


SAMPLERS = {
    "mercury": (MercurySampler, {}),
    "top loss": (TopLossSampler, {}),
    "uniform": (UniformSampler, {}),
    "ordered": (OrderedSampler, {"gives_model": True}),
    "pgd": (PGDSampler, {"gives_model": True}),
    "made": (lambda n, b: MercurySampler(n, b, scores="loss"), {}),
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_put_in_place_and_kept(name, steps, epochs):
    make, how = SAMPLERS[name]
    node = Node(train_with(make, epochs, **how), **{"local-epochs": epochs})
    for _ in range(2):
        taken = steps or epochs * FULL
        assert node.work(steps) == report(taken, epochs, epochs * FULL)
    kept, now = node.state(), node.results[1].state_dict()
    assert kept.keys() > now.keys()
    for key, value in now.items():
        np.testing.assert_array_equal(kept[key], value)
    fresh = Node(train_with(make, epochs, **how), **{"local-epochs": epochs})
    fresh.ask(steps)
    if steps:  # else an order is where it began
        assert any(not np.array_equal(fresh.state()[key], kept[key]) for key in now)


def test_pgd_with_a_model_is_fed_by_it():
    node = Node(train_with(PGDSampler, gives_model=True))
    node.ask(3)
    (feed,) = node.results
    assert isinstance(feed, PriorityFeed)
    assert isinstance(feed.sampler, PGDSampler)
    assert node.state()["batches"] == 3


def test_a_loader_made_anew_for_each_epoch_goes_on_learning():
    def train(msg, context):
        model = nn.Linear(3, 2)
        for _ in range(3):
            sampler = MercurySampler(NUM, BATCH, scores="loss")
            loader = hetero.batches(DataLoader(DATA, batch_sampler=sampler), msg)
            criterion = loader.criterion()
            for inputs, targets in loader:
                criterion(model(inputs), targets).backward()
        return sampler

    node = Node(train)
    node.ask()
    assert node.results[0].state_dict()["steps"] == 3 * FULL
    assert node.state()["steps"] == 3 * FULL


def test_two_samplers_of_a_message_are_both_kept():
    def train(msg, context):
        model = nn.Linear(3, 2)
        for sampler in (MercurySampler(NUM, BATCH), TopLossSampler(NUM, BATCH)):
            loader = hetero.batches(DataLoader(DATA, batch_sampler=sampler), msg)
            criterion = loader.criterion()
            for inputs, targets in loader:
                criterion(model(inputs), targets).backward()

    node = Node(train)
    node.ask()
    assert "importance" in node.state()
    assert "share" in node.state("sampler-TopLossSampler")


@pytest.mark.parametrize("by_hand", ["keep", "follow", "follow after"])
def test_what_is_kept_or_led_by_hand_is_not_twice(by_hand, monkeypatch):
    restored, load = [], MercurySampler.load_state_dict

    def spy(self, state):
        restored.append(self)
        load(self, state)

    monkeypatch.setattr(MercurySampler, "load_state_dict", spy)

    def batches(loader, msg):
        context = current_handler().context
        sampler = loader.batch_sampler
        if by_hand == "keep":
            keep(sampler, context, "mine")
        if by_hand == "follow":
            follow(sampler, msg, context, name="mine")
        steps = hetero.batches(loader, msg)
        if by_hand == "follow after":
            follow(sampler, msg, context, name="mine")
        return steps

    loader = lambda: DataLoader(DATA, batch_sampler=MercurySampler(NUM, BATCH))  # noqa: E731
    node = Node(train_with(batches=batches, loader=loader))
    node.ask(3)
    node.ask(3)
    assert len(restored) == 1
    assert node.state("mine")["steps"] == 6
    assert node.state() is None


def test_a_sampler_follows_the_server():
    node = Node(train_with(TopLossSampler))
    role = {keys.FAST: True, keys.FAST_SHARE: 0.5}
    node.ask(3, more=ConfigRecord(role))
    assert (node.results[0].fast, node.results[0].share) == (True, 0.5)


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (OrderedSampler, "model must be the model whose gradients the sampler uses"),
        (PGDSampler, "hetero.batches(loader, msg, sampler=PGDSampler, model=model)"),
        (lambda n, b: 3, "sampler must be a sampler class of flwr_hetero.sampler"),
        (MercurySampler(NUM, BATCH), "sampler must be a sampler class of flwr_hetero.sampler"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused(sampler, reason):
    assert reason in Node(train_with(sampler)).ask(3).error.reason


@pytest.mark.parametrize("loader", [lambda: [[1], [2]], lambda: DataLoader(DATA, batch_size=None)])
def test_a_sampler_needs_a_dataloader(loader):
    reply = Node(train_with(MercurySampler, loader=loader)).ask(3)
    assert "loader must be a DataLoader with a batch_size" in reply.error.reason


@pytest.mark.parametrize("reduction", [None, "mean", "none"])
def test_criterion_fits_the_sampler(reduction):
    loss_fn = reduction and nn.CrossEntropyLoss(reduction=reduction)
    done = []
    for sampler in (None, MercurySampler):
        node = Node(train_with(sampler, loss_fn=loss_fn, done=done))
        assert not node.ask(2).has_error()
    (_, own), (_, sampled) = done
    assert isinstance(sampled, WeightedLoss)
    outputs, targets = torch.randn(5, 2), torch.arange(5) % 2
    expected = nn.functional.cross_entropy(outputs, targets)
    assert own(outputs, targets).item() == pytest.approx(expected.item())
    assert reduction is None or loss_fn.reduction == reduction


# --- code without a loader ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "how", "taken", "work"),
    [
        (5, {}, 5, {"num-steps": 5, "passes": 1}),
        (5, {"default": 9}, 5, report(5, 1, 9, None)),
        (5, {"default": 9, "batch_size": 8}, 5, report(5, 1, 9, 8)),
        (None, {"default": 9, "batch_size": 8}, 9, report(9, 1, 9, 8)),
        (None, {}, None, {}),
    ],
)
def test_num_steps_is_the_nodes_word(asked, how, taken, work):
    def train(msg, context):
        hetero.num_steps(msg, **how)  # again in the same message changes nothing
        return hetero.num_steps(msg, **how)

    node = Node(train)
    assert node.work(asked) == work
    assert node.results == [taken]


@pytest.mark.parametrize("how", [{"default": 0}, {"batch_size": -1}, {"default": 2.5}])
def test_num_steps_refuses_what_is_no_number(how):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        hetero.num_steps({}, **how)


@pytest.mark.parametrize("config", [dict, lambda **keys: SimpleNamespace(config=keys)])
def test_the_config_of_the_older_api_will_do(config):
    asked = config(**{"num-steps": 4, "lr": 0.1})
    assert hetero.num_steps(asked) == 4
    assert len(list(hetero.batches(plain(), asked))) == 4
    assert len(list(hetero.batches(plain(), config(lr=0.1)))) == FULL
    with pytest.raises(ValueError, match="or the config passed to fit"):
        hetero.num_steps(None)


# --- the server ---------------------------------------------------------------------------------


def model_app(own=None, spoil=None):
    """Make an app that leaves its model as it is and reports no steps, or those given."""
    app = ClientApp(mods=[spoil, hetero] if spoil else [hetero])

    @app.train()
    def train(msg, context):
        list(hetero.batches(plain(), msg))
        metrics = MetricRecord({"num-examples": NUM, **(own or {})})
        content = RecordDict({"arrays": msg.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=msg)

    return app


def metrics_of(app, strategy=LocalSteps, **settings):
    records, wrapper = [], strategy(FedAvg(fraction_evaluate=0.0), **settings)
    wrapper.on_round_end = lambda run, record: records.append(record)
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    wrapper.start(LocalGrid(app, [DeviceProfile()] * 3), arrays, num_rounds=2)
    return records[-1]["train"]


def test_the_server_takes_the_work_for_the_metrics():
    found = metrics_of(model_app(), fast_steps=3)
    assert (found["num-steps"], found["examples-processed"]) == (3, 3 * BATCH)


def test_what_the_app_reports_itself_counts():
    assert metrics_of(model_app({"num-steps": 2}), fast_steps=3)["num-steps"] == 2


@pytest.mark.parametrize("claim", [nan, inf, -1, 2.0**60, "many", [1, 2], True])
def test_nonsense_is_no_report(claim):
    def spoil(message, context, call_next):
        reply = call_next(message, context)
        reply.content[keys.WORK]["num-steps"] = claim
        return reply

    found = metrics_of(model_app(spoil=spoil), fast_steps=3, on_missing="warn")
    assert "num-steps" not in found


def test_a_record_of_another_kind_is_no_report():
    def spoil(message, context, call_next):
        reply = call_next(message, context)
        reply.content[keys.WORK] = MetricRecord({"num-steps": 3})
        return reply

    with pytest.raises(RuntimeError):
        metrics_of(model_app(spoil=spoil), fast_steps=3)


def test_a_claim_of_more_steps_counts_no_more():
    def spoil(message, context, call_next):
        reply = call_next(message, context)
        reply.content[keys.WORK]["num-steps"] = 10**6
        return reply

    assert metrics_of(model_app(spoil=spoil), fast_steps=3)["num-steps"] <= 3


def test_an_app_of_the_older_api_takes_the_steps():
    class Client(NumPyClient):
        def fit(self, parameters, config):
            steps = hetero.num_steps(config, default=10, batch_size=BATCH)
            return [parameters[0] + steps], NUM, {}

    app = ClientApp(client_fn=lambda context: Client().to_client(), mods=[hetero])
    records, wrapper = [], LocalSteps(FedAvg(fraction_evaluate=0.0), fast_steps=3)
    wrapper.on_round_end = lambda run, record: records.append(record)
    grid = OlderClients(LocalGrid(app, [DeviceProfile()] * 3))
    wrapper.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=2)
    found = records[-1]["train"]
    assert (found["num-steps"], found["examples-processed"]) == (3, 3 * BATCH)


def test_strategies_of_flower_pass_over_it():
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    grid = LocalGrid(model_app(), [DeviceProfile()] * 3)
    config = ConfigRecord({"num-steps": 2})
    result = FedAvg(fraction_evaluate=0.0).start(grid, arrays, 2, train_config=config)
    assert dict(result.train_metrics_clientapp[2]) == {}
