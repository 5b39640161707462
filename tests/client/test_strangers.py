"""Apps that people have published, as they are: a slice is not an epoch."""

import logging
from collections import Counter
from itertools import cycle, islice, pairwise

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import History
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset
from toy import partition_of, reply_with

from flwr_hetero.client import _warned
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.sampler import MercurySampler, OrderedSampler, PGDSampler, TopLossSampler
from flwr_hetero.strategy import BiasedLocalSGD, FedBuff, FedSlice, LocalSteps

NUM, BATCH = 96, 8
FULL = NUM // BATCH
SPEEDS = (4, 1, 0.25)


def fedavg(**how):
    return FedAvg(fraction_evaluate=0.0, **how)


STRATEGIES = {
    "FedSlice": lambda: FedSlice(fedavg()),
    "LocalSteps": lambda: LocalSteps(fedavg(), 8),
    "BiasedLocalSGD": lambda: BiasedLocalSGD(fedavg(), 8),
    "FedBuff": lambda: FedBuff(LocalSteps(fedavg(), 8, budget="deadline")),
}
SAMPLERS = {
    "none": {},
    "mercury": {"sampler": MercurySampler},
    "top loss": {"sampler": TopLossSampler},
    "pgd": {"sampler": PGDSampler},
    "ordered": {"sampler": OrderedSampler},
}
BY_DAY = [(name, "none") for name in STRATEGIES] + [("FedSlice", "ordered")]
"""The other samplers: tests/client/test_samplers.py, without the rounds of a fleet."""
every_strategy = pytest.mark.parametrize("strategy", ["FedSlice", "LocalSteps"])
every_pair = pytest.mark.parametrize(
    ("strategy", "sampler"),
    [
        pytest.param(
            strategy,
            sampler,
            marks=[] if (strategy, sampler) in BY_DAY else pytest.mark.nightly,
        )
        for strategy in STRATEGIES
        for sampler in SAMPLERS
    ],
)


def flat(lists):
    return [item for part in lists for item in part]


def net():
    torch.manual_seed(0)
    return nn.Linear(8, 3)


def data_of(partition):
    inputs = torch.randn(NUM, 8, generator=torch.Generator().manual_seed(partition))
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), BATCH, shuffle=True)


def sgd(model, **how):
    return torch.optim.SGD(model.parameters(), 0.1, **how)


def backward(model, batch, loss=nn.functional.cross_entropy):
    loss(model(batch[0]), batch[1]).backward()


def fit(model, optimizer, batches, loss=nn.functional.cross_entropy, after=lambda batch: None):
    """Step on each batch, and call ``after`` with it; return their number."""
    count = 0
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch, loss)
        optimizer.step()
        after(batch)
        count += 1
    return count


class Stranger:
    """A run of an app on devices of several speeds; ``train`` gets model, message and partition."""

    def __init__(self, train, strategy="FedSlice", rounds=2, **run_config):
        _warned.clear()
        self.replies, app = [], ClientApp(mods=[self.see, hetero])

        @app.train()
        def answer(msg, context):
            model = nn.Linear(8, 3)
            model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            num_examples = train(model, msg, partition_of(context)) or NUM
            arrays = dict(ArrayRecord(model.state_dict()))
            return reply_with(msg, {"num-examples": num_examples}, arrays)

        made = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy
        self.history = History(made)
        grid = LocalGrid(app, [DeviceProfile(speed) for speed in SPEEDS], run_config=run_config)
        self.history.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds)

    def see(self, msg, context, call_next):
        """Note what the mod says of each message, and what was asked."""
        reply = call_next(msg, context)
        assert not reply.has_error(), reply.error.reason
        asked = int(msg.content["config"].get("num-steps", 0))
        work = dict(reply.content["flwr-hetero.work"])
        self.replies.append((partition_of(context), asked, work))
        return reply

    @property
    def asked(self):
        return [asked for _, asked, _ in self.replies]

    @property
    def steps(self):
        return [work["num-steps"] for _, _, work in self.replies]

    @property
    def failures(self):
        return [failure for record in self.history.records for failure in record["failures"]]


def texts_in(caplog, part):
    """Return the warnings that have this in their text."""
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING and part in r.message]


def prepared(model, msg, partition, sampler="none"):
    """Return the batches, the loss and the optimizer of an app."""
    loader = hetero.batches(data_of(partition), msg, model=model, **SAMPLERS[sampler])
    return loader, loader.criterion(), sgd(model)


@every_pair
@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_epochs_share_the_steps_and_a_pass_without_gradients_is_the_loaders_own(
    epochs, strategy, sampler, caplog
):
    seen = {}

    def train(model, msg, partition):
        loader, criterion, optimizer = prepared(model, msg, partition, sampler)
        counts = [len(loader)]
        for _ in range(epochs):
            counts.append(fit(model, optimizer, loader, criterion))
            assert len(loader) == counts[-1] > 0
        model.eval()
        with torch.no_grad():
            assert sum(len(targets) for _, targets in loader) == NUM
        # The mean of a loss over that pass divides by its length.
        assert len(loader) == FULL
        seen.setdefault(partition, []).append(counts)

    run = Stranger(train, strategy, rounds=3 if epochs > 1 else 2)
    for first, *later in seen.values():
        assert all(len(set(counts)) == 1 for counts in later)
        assert epochs > 1 or first[0] == first[1]
    assert sum(run.steps) == sum(sum(counts[1:]) for counts in flat(seen.values()))
    assert epochs > 1 or run.steps == run.asked
    assert not run.failures
    assert not texts_in(caplog, "had no optimizer step")


LOOKS = {
    "one batch": lambda loader: next(iter(loader)),
    "classes": lambda loader: Counter(int(y) for _, targets in loader for y in targets),
}


@pytest.mark.parametrize(("look", "early"), [("one batch", True), ("classes", False)])
def test_other_passes_without_a_step_do_not_count_and_are_said_once(look, early, caplog):
    trained = []
    kept = []

    def train(model, msg, partition):
        loader = hetero.batches(data_of(partition), msg)
        if early:
            kept.append(LOOKS[look](loader))
        trained.append(fit(model, sgd(model), loader))
        if not early:
            kept.append(LOOKS[look](loader))

    run = Stranger(train)
    later = len(SPEEDS) if early else 0  # what a node's first message does not know yet
    assert trained[later:] == run.asked[later:] == run.steps[later:]
    if look == "classes" and not early:
        assert all(sum(counts.values()) == NUM for counts in kept)
    (text,) = texts_in(caplog, "had no optimizer step")
    assert "torch.no_grad()" in text


def test_local_epochs_of_a_message_are_read():
    told = {1: ("local-epochs", 2), 2: ("local_epochs", 4)}
    lengths = {}

    def train(model, msg, partition):
        number = int(msg.content["config"]["server-round"])
        loader, _, optimizer = prepared(model, msg, partition)
        counts = [fit(model, optimizer, loader) for _ in range(told[number][1])]
        lengths.setdefault(number, []).append(set(counts))

    class Telling(FedSlice):
        def on_instructions(self, context, messages, grid):
            for message in messages:
                config = message.content["config"]
                key, epochs = told[int(config["server-round"])]
                config[key] = epochs
            return super().on_instructions(context, messages, grid)

    Stranger(train, Telling(fedavg()), rounds=2)
    assert lengths.keys() == told.keys()
    assert all(len(counts) == 1 for counts in flat(lengths.values()))


@every_pair
def test_accumulation_takes_whole_steps(strategy, sampler):
    every = FULL if strategy in ("LocalSteps", "FedBuff") else 4
    counts = []

    def train(model, msg, partition):
        loader, criterion, optimizer = prepared(model, msg, partition, sampler)
        steps = given = 0
        for given, batch in enumerate(loader, 1):
            backward(model, batch, criterion)
            if given % every == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        counts.append((given, steps))

    run = Stranger(train, strategy, rounds=3)
    assert all(steps for _, steps in counts)
    assert all(given == steps * every for given, steps in counts[len(SPEEDS) :])
    assert min(run.asked[len(SPEEDS) :]) >= every
    assert not run.failures


@pytest.mark.parametrize("first", [True, False])
def test_the_second_of_two_optimizers_steps_as_often_as_in_fedavg(first):
    counts = []

    def train(model, msg, partition):
        critic = sgd(model)
        other = torch.optim.Adam(model.parameters(), 1e-4)
        given = seldom = 0
        for batch in hetero.batches(data_of(partition), msg):
            fit(model, critic, [batch])
            if given % 5 == (0 if first else 4):
                seldom += fit(model, other, [batch])
            given += 1
        counts.append((given, seldom))

    Stranger(train, rounds=3)
    assert all(given == 5 * seldom for given, seldom in counts[len(SPEEDS) :])


def test_a_message_without_an_optimizer_step_is_warned(caplog):
    given = []

    def train(model, msg, partition):
        sgd(model)
        given.append(sum(1 for _ in hetero.batches(data_of(partition), msg)))

    run = Stranger(train)
    assert texts_in(caplog, "no optimizer has stepped in a message")
    # It is prolonged once, and never again.
    assert given[: len(SPEEDS)] == [FULL] * len(SPEEDS)
    assert given[len(SPEEDS) :] == run.asked[len(SPEEDS) :]
    assert run.steps == given


def test_an_app_that_steps_by_hand_is_left_alone(caplog):
    def train(model, msg, partition):
        for batch in hetero.batches(data_of(partition), msg):
            backward(model, batch)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    run = Stranger(train)
    assert run.steps == run.asked
    assert not texts_in(caplog, "optimizer") + texts_in(caplog, "batches")


def rates_of(make, *, rounds=3, per_epoch=False, strategy="FedSlice", batches_of=None):
    """Return the rates of each node's steps with a schedule, in the order of its messages."""
    rates = {}
    batches_of = batches_of or (lambda loader, msg: hetero.batches(loader, msg))

    def train(model, msg, partition):
        loader = batches_of(data_of(partition), msg)
        optimizer = sgd(model)
        schedule = make(optimizer, loader)

        def after(_):
            # The rate before the first step is that of the app, the others are the schedule's.
            rates.setdefault(partition, []).append(optimizer.param_groups[0]["lr"])
            if not per_epoch:
                schedule.step()

        fit(model, optimizer, loader, after=after)
        if per_epoch:
            schedule.step()

    Stranger(train, strategy, rounds=rounds)
    return rates


def wanted_rates(make, count, *, again=True):
    """Return the rates of so many steps, where a schedule begins with each job."""
    rates = []
    while len(rates) < count:
        optimizer = sgd(net())
        schedule = make(optimizer, None)
        for _ in range(FULL if again else count):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    return rates[:count]


def chained(optimizer, _):
    parts = [
        schedules.LinearLR(optimizer, 0.1, total_iters=5),
        schedules.ExponentialLR(optimizer, 0.9),
    ]
    return schedules.SequentialLR(optimizer, parts, [5])


FALLING = {
    "one cycle": lambda optimizer, _: schedules.OneCycleLR(optimizer, 0.5, total_steps=FULL),
    "in a row": chained,
    "together": lambda optimizer, _: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 4), schedules.ExponentialLR(optimizer, 0.9)]
    ),
    "by hand": lambda optimizer, _: schedules.LambdaLR(optimizer, lambda s: 1 / (1 + s)),
}


@pytest.mark.parametrize("name", FALLING)
def test_a_schedule_goes_on_through_a_job_and_begins_with_the_next(name):
    for rates in rates_of(FALLING[name]).values():
        assert rates == pytest.approx(wanted_rates(FALLING[name], len(rates)))


def warm_up(optimizer, _):
    return schedules.LambdaLR(optimizer, lambda s: min(1.0, (1 + s) / 15))


@every_strategy
def test_a_warm_up_happens_once(strategy):
    for rates in rates_of(warm_up, rounds=5, strategy=strategy).values():
        assert rates == pytest.approx(wanted_rates(warm_up, len(rates), again=False))


def by_steps(loader, msg):
    return islice(cycle(loader), hetero.num_steps(msg, default=30))


def broken_off(loader, msg):
    return islice(hetero.batches(loader, msg), 1)


@pytest.mark.parametrize(("batches_of", "steps"), [(by_steps, 3), (broken_off, 1)])
def test_a_schedule_goes_on_in_a_loop_by_steps_and_where_a_loop_breaks_off(batches_of, steps):
    strategy = LocalSteps(fedavg(), steps, gamma=1.0)
    rates = rates_of(warm_up, rounds=4, strategy=strategy, batches_of=batches_of)
    for rate in rates.values():
        assert rate == pytest.approx(wanted_rates(warm_up, len(rate), again=False))


def test_a_schedule_of_the_loaders_length_spans_the_message():
    def train(model, msg, partition):
        loader, _, optimizer = prepared(model, msg, partition)
        schedule = schedules.OneCycleLR(optimizer, 0.5, total_steps=len(loader))
        count = fit(model, optimizer, loader, after=lambda _: schedule.step())
        assert schedule.last_epoch == count

    Stranger(train)


def test_a_schedule_by_epochs_begins_with_each_message():
    rates = rates_of(lambda optimizer, _: schedules.StepLR(optimizer, 1, 0.1), per_epoch=True)
    assert {rate for rates in rates.values() for rate in rates} == {0.1}


@every_strategy
def test_a_loss_scaler_goes_on(strategy):
    counts = {}

    def train(model, msg, partition):
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu")
        for inputs, targets in hetero.batches(data_of(partition), msg):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
            if scaler.get_scale() > 16384:
                model.weight.grad.fill_(float("inf"))
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            own = counts.setdefault(partition, [0, 0])
            own[0] += 1
            own[1] += scaler.get_scale() < before

    Stranger(train, strategy)
    assert [skipped for _, skipped in counts.values()] == [2] * len(SPEEDS)


def test_an_average_of_models_goes_on_through_a_job():
    counts = {}

    def train(model, msg, partition):
        average = torch.optim.swa_utils.AveragedModel(model)
        before = int(average.n_averaged)
        batches = hetero.batches(data_of(partition), msg)
        fit(model, sgd(model), batches, after=lambda _: average.update_parameters(model))
        counts.setdefault(partition, []).append((before, int(average.n_averaged)))

    Stranger(train, rounds=4)
    for ages in counts.values():
        pairs = list(pairwise(ages))
        assert all(after[0] in (before[1], 0) for before, after in pairs)
        assert any(after[0] for _, after in pairs)
        # With the next job it begins again, as in FedAvg's next round.
        assert max(most for _, most in ages) < 2 * FULL


def test_other_optimizers_begin_again_and_leave_the_first_ones_state():
    entries = {}

    def train(model, msg, partition):
        number = int(msg.content["config"]["server-round"])
        if number % 2:
            optimizer = sgd(model, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(model.parameters(), 0.01, amsgrad=number > 2)
        fit(model, optimizer, hetero.batches(data_of(partition), msg))
        entries.setdefault(number, set()).update(*optimizer.state.values())

    run = Stranger(train, rounds=4)
    assert entries[1] == entries[3] == {"momentum_buffer"}
    assert entries[4] - entries[2] == {"max_exp_avg_sq"}
    assert not run.failures


class Foreign:
    """A schedule of another library: nothing of torch's."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_any_object_with_a_state_goes_on_with_one_line():
    counts = {}

    def train(model, msg, partition):
        foreign = Foreign()
        hetero.keep(foreign)
        foreign.steps += fit(model, sgd(model), hetero.batches(data_of(partition), msg))
        counts[partition] = foreign.steps

    run = Stranger(train)
    done = Counter()
    for partition, _, work in run.replies:
        done[partition] += work["num-steps"]
    assert counts == done


@pytest.mark.parametrize(
    ("kept", "rule"),
    [
        (lambda: [object()], "have state_dict and load_state_dict"),
        (lambda: [Foreign(), Foreign()], "be another one for each object"),
    ],
)
def test_what_cannot_be_kept_is_refused(kept, rule):
    def train(model, msg, partition):
        for each in kept():
            hetero.keep(each)

    with pytest.raises((AssertionError, RuntimeError), match=rule):
        Stranger(train)


def restarted(loader):
    """Give 30 batches, from a new iterator whenever the last one ends."""
    batches = iter(loader)
    for _ in range(30):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def test_a_loop_by_steps_that_runs_out_of_batches_is_told_what_to_do():
    def train(model, msg, partition):
        optimizer = sgd(model)
        batches = iter(hetero.batches(data_of(partition), msg))
        for _ in range(40):
            fit(model, optimizer, [next(batches)])

    with pytest.raises(RuntimeError, match=r"hetero\.batches gives .*hetero\.num_steps"):
        Stranger(train)


@pytest.mark.parametrize("repeat", [lambda loader: islice(cycle(loader), 30), restarted])
def test_a_loop_by_steps_that_repeats_batches_is_told_what_to_do(repeat, caplog):
    def train(model, msg, partition):
        fit(model, sgd(model), repeat(hetero.batches(data_of(partition), msg)))

    run = Stranger(train, rounds=4)
    assert texts_in(caplog, "hetero.num_steps(msg, default=30)")
    if repeat is restarted:
        job = [work["job-steps"] for _, _, work in run.replies[3 * len(SPEEDS) :]]
        assert set(job) == {30}


@every_strategy
def test_loaders_side_by_side_have_a_place_each_and_count_once(strategy):
    seen = {}

    def train(model, msg, partition):
        ordered = [DataLoader(range(start, start + 20), 2) for start in (0, 100)]
        loaders = [hetero.batches(each, msg) for each in ordered]
        optimizer = sgd(model)
        pairs = []
        for left, right in zip(*loaders, strict=False):
            fit(model, optimizer, [(torch.ones(2, 8), torch.zeros(2).long())])
            pairs.append((left.tolist(), right.tolist()))
        assert len(pairs) == loaders[0].num_steps
        seen.setdefault(partition, []).extend(pairs)

    run = Stranger(train, strategy)
    assert run.steps == run.asked
    for pairs in seen.values():
        lefts = [number for left, _ in pairs for number in left]
        assert lefts == [i % 20 for i in range(len(lefts))]
        assert all(right == [100 + number for number in left] for left, right in pairs)


def weights_of(report, epochs=1):
    """Return the mean weight of each node's replies, by what it reports as its examples."""

    def train(model, msg, partition):
        loader, _, optimizer = prepared(model, msg, partition)
        count = sum(fit(model, optimizer, loader) for _ in range(epochs))
        return report(loader, BATCH * count)

    run = Stranger(train, rounds=3, **{"local-epochs": epochs})
    assert not run.failures
    total = Counter()
    for record in run.history.records:
        total.update(record["weights"])
    return [total[name] / sum(total.values()) for name in sorted(total)]


@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_node_weighs_by_its_data_whatever_it_reports(epochs):
    usual = weights_of(lambda loader, seen: NUM, epochs)
    for report in (lambda loader, seen: seen, lambda loader, seen: len(loader)):
        assert weights_of(report, epochs) == pytest.approx(usual, rel=0.1)
