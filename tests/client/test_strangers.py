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

from flwr_hetero.client.handler import _said
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.sampler import MercurySampler, OrderedSampler, PGDSampler, TopLossSampler
from flwr_hetero.strategy import BiasedLocalSGD, FedBuff, FedSlice, LocalSteps

NUM, BATCH = 160, 8
FULL = NUM // BATCH
SPEEDS = (4, 2, 1, 0.25)


def fedavg(**how):
    return FedAvg(fraction_evaluate=0.0, **how)


STRATEGIES = {
    "FedSlice": lambda: FedSlice(fedavg()),
    "LocalSteps": lambda: LocalSteps(fedavg(), 8),
    "BiasedLocalSGD": lambda: BiasedLocalSGD(fedavg(), 8),
    "FedBuff": lambda: FedBuff(LocalSteps(fedavg(), 8, budget="slice")),
}
SAMPLERS = {
    "none": {},
    "mercury": {"sampler": MercurySampler},
    "top loss": {"sampler": TopLossSampler},
    "pgd": {"sampler": PGDSampler},
    "ordered": {"sampler": OrderedSampler},
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
every_pair = pytest.mark.parametrize(
    ("strategy", "sampler"),
    [
        pytest.param(
            strategy,
            sampler,
            marks=[] if sampler == "none" or strategy == "FedSlice" else pytest.mark.nightly,
        )
        for strategy in STRATEGIES
        for sampler in SAMPLERS
    ],
)


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


def step(model, optimizer, batch, loss=nn.functional.cross_entropy):
    optimizer.zero_grad()
    backward(model, batch, loss)
    optimizer.step()


class Stranger:
    """A run of an app on devices of four speeds; ``train`` gets model, message and partition."""

    def __init__(self, train, strategy="FedSlice", rounds=2, num_examples=None, **run_config):
        _said.clear()
        self.replies, app = [], ClientApp(mods=[self.see, hetero])

        @app.train()
        def answer(msg, context):
            model = net()
            model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            own = train(model, msg, partition_of(context))
            arrays = dict(ArrayRecord(model.state_dict()))
            return reply_with(msg, {"num-examples": num_examples or own or NUM}, arrays)

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
    def steps(self):
        return [work["num-steps"] for _, _, work in self.replies]

    @property
    def failures(self):
        return [failure for record in self.history.records for failure in record["failures"]]


def warnings_in(caplog):
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


# --- passes that do not train ------------------------------------------------------------
@every_pair
def test_a_pass_without_gradients_is_the_loaders_own(strategy, sampler):
    seen = []

    def train(model, msg, partition):
        loader = hetero.batches(data_of(partition), msg, model=model, **SAMPLERS[sampler])
        criterion, optimizer = loader.criterion(), sgd(model)
        trained, before = 0, len(loader)
        for batch in loader:
            step(model, optimizer, batch, criterion)
            trained += 1
        model.eval()
        with torch.no_grad():
            looked_at = sum(len(targets) for _, targets in loader)
        seen.append((before, trained, loader.num_steps, looked_at, len(loader)))

    run = Stranger(train, strategy)
    assert all(before == trained == asked for before, trained, asked, _, _ in seen)
    # The mean of a loss over that pass divides by its length.
    assert {each[3:] for each in seen} == {(NUM, FULL)}
    assert run.steps == [trained for _, trained, *_ in seen]
    assert not run.failures


@every_sampler
def test_without_a_slice_such_a_pass_counts_nothing_either(sampler):
    def train(model, msg, partition):
        loader = hetero.batches(data_of(partition), msg, model=model, **SAMPLERS[sampler])
        criterion, optimizer = loader.criterion(), sgd(model)
        for batch in loader:
            step(model, optimizer, batch, criterion)
        with torch.inference_mode():
            assert sum(len(targets) for _, targets in loader) == NUM

    assert Stranger(train, fedavg(), rounds=1).steps == [FULL] * len(SPEEDS)


LOOKS = {
    "one batch": lambda loader: next(iter(loader)),
    "an iterator that stays": lambda loader: [it := iter(loader), next(it)],
    "classes": lambda loader: Counter(int(y) for _, targets in loader for y in targets),
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("look", LOOKS)
def test_other_passes_without_a_step_do_not_count_and_are_said_once(look, early, caplog):
    trained, kept = [], []

    def train(model, msg, partition):
        loader = hetero.batches(data_of(partition), msg)
        if early:
            kept.append(LOOKS[look](loader))
        optimizer = sgd(model)
        trained.append(sum(1 for batch in loader if not step(model, optimizer, batch)))
        if not early:
            kept.append(LOOKS[look](loader))

    run = Stranger(train)
    later = len(SPEEDS) if early else 0  # what a node's first message does not know yet
    asked = [asked for _, asked, _ in run.replies]
    assert trained[later:] == asked[later:] == run.steps[later:]
    if look == "classes" and not early:
        assert all(sum(each.values()) == NUM for each in kept)
    (text,) = [r.message for r in caplog.records if "had no optimizer step" in r.message]
    assert "torch.no_grad()" in text


# --- epochs ------------------------------------------------------------------------------
@every_pair
def test_no_epoch_is_empty_and_all_are_alike_later(strategy, sampler):
    lengths = []

    def train(model, msg, partition):
        loader = hetero.batches(data_of(partition), msg, model=model, **SAMPLERS[sampler])
        criterion, optimizer, own = loader.criterion(), sgd(model), []
        for _ in range(3):
            own.append(sum(1 for batch in loader if not step(model, optimizer, batch, criterion)))
            assert len(loader) == own[-1]
        lengths.append((partition, own))

    run = Stranger(train, strategy, rounds=3)
    assert all(min(own) > 0 for _, own in lengths)
    later = [own for i, (node, own) in enumerate(lengths) if node in [n for n, _ in lengths[:i]]]
    assert all(len(set(own)) == 1 for own in later)
    assert not run.failures


@pytest.mark.parametrize("key", ["local-epochs", "local_epochs"])
def test_local_epochs_of_a_message_are_read(key):
    lengths = []

    def train(model, msg, partition):
        loader, optimizer = hetero.batches(data_of(partition), msg), sgd(model)
        epochs = 2 if msg.content["config"]["server-round"] == 1 else 4
        counts = [
            sum(1 for batch in loader if not step(model, optimizer, batch)) for _ in range(epochs)
        ]
        lengths.append((epochs, counts))

    class Telling(FedSlice):
        def on_instructions(self, context, messages, grid):
            for message in messages:
                number = message.content["config"]["server-round"]
                message.content["config"][key] = 2 if number == 1 else 4
            return super().on_instructions(context, messages, grid)

    Stranger(train, Telling(fedavg()), rounds=2)
    assert all(len(set(counts)) == 1 for _, counts in lengths)
    assert {epochs for epochs, _ in lengths} == {2, 4}


# --- whole optimizer steps ---------------------------------------------------------------
@every_pair
@pytest.mark.parametrize("every", [4, 12])
def test_accumulation_takes_whole_steps(every, strategy, sampler):
    counts = []

    def train(model, msg, partition):
        loader = hetero.batches(data_of(partition), msg, model=model, **SAMPLERS[sampler])
        criterion, optimizer, steps, given = loader.criterion(), sgd(model), 0, 0
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
    asked = {asked for _, asked, _ in run.replies[len(SPEEDS) :]}
    assert min(asked) >= every
    assert not run.failures


@pytest.mark.parametrize("first", [True, False])
def test_the_second_of_two_optimizers_steps_as_often_as_in_fedavg(first):
    counts = []

    def train(model, msg, partition):
        critic, other = sgd(model), torch.optim.Adam(model.parameters(), 1e-4)
        own = [0, 0]
        for number, batch in enumerate(hetero.batches(data_of(partition), msg)):
            step(model, critic, batch)
            own[0] += 1
            if number % 5 == (0 if first else 4):
                step(model, other, batch)
                own[1] += 1
        counts.append(own)

    Stranger(train, rounds=3)
    assert all(own[0] == 5 * own[1] for own in counts[len(SPEEDS) :])


def test_an_optimizer_that_steps_after_each_epoch_makes_slices_no_longer():
    def train(model, msg, partition):
        often, after = sgd(model), torch.optim.Adam(model.parameters(), 1e-4)
        for batch in hetero.batches(data_of(partition), msg):
            step(model, often, batch)
        step(model, after, batch)

    run = Stranger(train, LocalSteps(fedavg(), 4, gamma=1.0), rounds=3)
    assert run.steps[len(SPEEDS) :] == [4] * 2 * len(SPEEDS)


def test_a_message_without_an_optimizer_step_is_said(caplog):
    given = []

    def train(model, msg, partition):
        sgd(model)
        given.append(sum(1 for _ in hetero.batches(data_of(partition), msg)))

    run = Stranger(train)
    assert [r for r in caplog.records if "no optimizer has stepped in a message" in r.message]
    # It is prolonged once, and never again.
    asked = [asked for _, asked, _ in run.replies]
    assert given[: len(SPEEDS)] == [FULL] * len(SPEEDS)
    assert given[len(SPEEDS) :] == asked[len(SPEEDS) :]
    assert run.steps == given


def test_an_app_that_steps_by_hand_is_left_alone(caplog):
    def train(model, msg, partition):
        for batch in hetero.batches(data_of(partition), msg):
            backward(model, batch)
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
                    each.grad = None

    run = Stranger(train)
    assert run.steps == [asked for _, asked, _ in run.replies]
    assert not [text for text in warnings_in(caplog) if "optimizer" in text or "batches" in text]


# --- what goes on --------------------------------------------------------------------------
def rates_of(make, *, rounds=4, per_epoch=False, strategy="FedSlice"):
    """Return the rates of each node's steps with a schedule, in the order of its messages."""
    rates = {}

    def train(model, msg, partition):
        loader, optimizer = hetero.batches(data_of(partition), msg), sgd(model)
        schedule = make(optimizer, loader)
        for batch in loader:
            rates.setdefault(partition, []).append(optimizer.param_groups[0]["lr"])
            step(model, optimizer, batch)
            if not per_epoch:
                schedule.step()
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
    "cosine": lambda optimizer, _: schedules.CosineAnnealingLR(optimizer, FULL),
    "one cycle": lambda optimizer, _: schedules.OneCycleLR(optimizer, 0.5, total_steps=FULL),
    "exponential": lambda optimizer, _: schedules.ExponentialLR(optimizer, 0.9),
    "by steps": lambda optimizer, _: schedules.StepLR(optimizer, 7, 0.5),
    "milestones": lambda optimizer, _: schedules.MultiStepLR(optimizer, [3, 9], 0.5),
    "restarts": lambda optimizer, _: schedules.CosineAnnealingWarmRestarts(optimizer, 6),
    "in a row": chained,
    "together": lambda optimizer, _: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 4), schedules.ExponentialLR(optimizer, 0.9)]
    ),
    "by hand": lambda optimizer, _: schedules.LambdaLR(optimizer, lambda s: 1 / (1 + s)),
    "polynomial": lambda optimizer, _: schedules.PolynomialLR(optimizer, FULL),
}


@pytest.mark.parametrize("name", FALLING)
def test_a_schedule_goes_on_through_a_job_and_begins_with_the_next(name):
    for rates in rates_of(FALLING[name]).values():
        assert rates == pytest.approx(wanted_rates(FALLING[name], len(rates)))


@every_strategy
def test_a_warm_up_happens_once(strategy):
    def warm_up(optimizer, _):
        return schedules.LambdaLR(optimizer, lambda s: min(1.0, (1 + s) / 15))

    for rates in rates_of(warm_up, rounds=5, strategy=strategy).values():
        assert rates == pytest.approx(wanted_rates(warm_up, len(rates), again=False))


def to_zero(optimizer, loader):
    total = len(loader)
    return schedules.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / total))


BY_LENGTH = {
    "one cycle": lambda optimizer, loader: schedules.OneCycleLR(
        optimizer, 0.5, total_steps=len(loader)
    ),
    "to zero": to_zero,
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_schedule_of_the_loaders_length_spans_the_message(name):
    def train(model, msg, partition):
        loader, optimizer = hetero.batches(data_of(partition), msg), sgd(model)
        schedule = BY_LENGTH[name](optimizer, loader)
        for number, batch in enumerate(loader):
            assert schedule.last_epoch == number
            step(model, optimizer, batch)
            schedule.step()

    Stranger(train)


def test_a_schedule_by_epochs_begins_with_each_message():
    by_epochs = {"make": lambda optimizer, _: schedules.StepLR(optimizer, 1, 0.1)}
    assert {rate for rates in rates_of(**by_epochs, per_epoch=True).values() for rate in rates} == {
        0.1
    }


@pytest.mark.parametrize("steps", [1, 3])
def test_a_schedule_goes_on_in_a_loop_by_steps(steps):
    rates = []

    def train(model, msg, partition):
        optimizer, batches = sgd(model), cycle(data_of(partition))
        schedule = schedules.LambdaLR(optimizer, lambda s: min(1.0, (1 + s) / 15))
        for batch in islice(batches, hetero.num_steps(msg, default=30)):
            step(model, optimizer, batch)
            # The first rate is that of the last message's end by now.
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()

    Stranger(train, LocalSteps(fedavg(), steps, gamma=1.0), rounds=6)
    own = rates[:: len(SPEEDS)] if steps == 1 else rates[:3] + rates[3 * len(SPEEDS) :][:3]
    assert own == pytest.approx([0.1 * (1 + s) / 15 for s in range(len(own))])


def test_a_schedule_goes_on_where_the_loop_breaks_off():
    rates = []

    def train(model, msg, partition):
        optimizer = sgd(model)
        schedule = schedules.LambdaLR(optimizer, lambda s: min(1.0, (1 + s) / 15))
        for batch in hetero.batches(data_of(partition), msg):
            step(model, optimizer, batch)
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
            break

    Stranger(train, LocalSteps(fedavg(), 1, gamma=1.0), rounds=4)
    assert rates[:: len(SPEEDS)] == pytest.approx([0.1 * (1 + s) / 15 for s in range(4)])


def test_a_rate_of_the_servers_is_taken_with_the_schedule():
    seen = []

    def train(model, msg, partition):
        number = msg.content["config"]["server-round"]
        optimizer = torch.optim.SGD(model.parameters(), 0.1 / number)
        schedule = schedules.LambdaLR(optimizer, lambda s: min(1.0, (1 + s) / 10))
        for batch in hetero.batches(data_of(partition), msg):
            step(model, optimizer, batch)
            schedule.step()
        seen.append((number, optimizer.param_groups[0]["lr"]))

    Stranger(train, rounds=6)
    assert all(rate == pytest.approx(0.1 / number) for number, rate in seen if number > 4)


@every_strategy
def test_a_loss_scaler_goes_on(strategy):
    counts = {}

    def train(model, msg, partition):
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
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
        average, optimizer = torch.optim.swa_utils.AveragedModel(model), sgd(model)
        before = int(average.n_averaged)
        for batch in hetero.batches(data_of(partition), msg):
            step(model, optimizer, batch)
            average.update_parameters(model)
        counts.setdefault(partition, []).append((before, int(average.n_averaged)))

    Stranger(train, rounds=4)
    for own in counts.values():
        pairs = list(pairwise(own))
        assert all(after[0] in (before[1], 0) for before, after in pairs)
        assert any(after[0] for _, after in pairs)
        # With the next job it begins anew, as in FedAvg's next round.
        assert max(most for _, most in own) < 2 * FULL


def test_other_optimizers_begin_anew_and_leave_the_first_ones_state():
    entries = {}

    def train(model, msg, partition):
        number = int(msg.content["config"]["server-round"])
        if number % 2:
            optimizer = sgd(model, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(model.parameters(), 0.01, amsgrad=number > 2)
        first = {}
        for batch in hetero.batches(data_of(partition), msg):
            step(model, optimizer, batch)
            first = first or {key for own in optimizer.state.values() for key in own}
        entries.setdefault(number, set()).update(first)

    run = Stranger(train, rounds=4)
    assert entries[1] == entries[3] == {"momentum_buffer"}
    assert entries[4] - entries[2] == {"max_exp_avg_sq"}
    assert not run.failures


def test_the_state_of_an_optimizer_that_does_not_step_stays():
    ages = {}

    def train(model, msg, partition):
        often, seldom = sgd(model, momentum=0.9), torch.optim.Adam(model.parameters(), 1e-3)
        calls = ages.setdefault(partition, [])
        is_turn = len(calls) % 3 == 0
        for batch in hetero.batches(data_of(partition), msg):
            step(model, often, batch)
            if is_turn:
                step(model, seldom, batch)
        calls.append([int(own["step"]) for own in seldom.state.values()][:1])

    Stranger(train, rounds=4)
    for own in ages.values():
        known = [each[0] for each in own if each]
        assert known == sorted(known)
        assert len(known) < 2 or known[-1] > known[0]


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
        optimizer, foreign = sgd(model), Foreign()
        hetero.keep(foreign)
        for batch in hetero.batches(data_of(partition), msg):
            step(model, optimizer, batch)
            foreign.steps += 1
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


# --- loops by steps, and several loaders ---------------------------------------------------
def taking(batches_of):
    def train(model, msg, partition):
        optimizer = sgd(model)
        for batch in batches_of(hetero.batches(data_of(partition), msg)):
            step(model, optimizer, batch)

    return train


def restarted(loader, count=30):
    batches = iter(loader)
    for _ in range(count):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def test_a_loop_by_steps_that_runs_out_of_batches_is_told_what_to_do():
    def train(model, msg, partition):
        optimizer, batches = sgd(model), iter(hetero.batches(data_of(partition), msg))
        for _ in range(40):
            step(model, optimizer, next(batches))

    with pytest.raises(RuntimeError, match=r"hetero\.batches gives .*hetero\.num_steps"):
        Stranger(train)


@pytest.mark.parametrize("name", ["cycle", "restart"])
def test_a_loop_by_steps_that_repeats_batches_is_told_what_to_do(name, caplog):
    repeat = {"cycle": lambda loader: islice(cycle(loader), 30), "restart": restarted}[name]
    run = Stranger(taking(repeat), rounds=6)
    texts = [r.message for r in caplog.records if "hetero.num_steps(msg, default=30)" in r.message]
    assert texts
    if name == "restart":
        job = [work["job-steps"] for _, _, work in run.replies[3 * len(SPEEDS) :]]
        assert set(job) == {30}


def test_steps_for_a_loop_by_steps(caplog):
    taken = []

    def train(model, msg, partition):
        optimizer, batches = sgd(model), cycle(data_of(partition))
        steps = hetero.num_steps(msg, default=30, batch_size=BATCH)
        for batch in islice(batches, steps):
            step(model, optimizer, batch)
        taken.append(steps)

    run = Stranger(train)
    assert run.steps == taken == [asked for _, asked, _ in run.replies]
    assert not [text for text in warnings_in(caplog) if "num_steps" in text]


@every_strategy
def test_loaders_side_by_side_have_a_place_each_and_count_once(strategy):
    seen = {}

    def train(model, msg, partition):
        ordered = [DataLoader(range(start, start + 20), 2) for start in (0, 100)]
        loaders, optimizer = [hetero.batches(each, msg) for each in ordered], sgd(model)
        pairs = 0
        for left, right in zip(*loaders, strict=False):
            step(model, optimizer, (torch.ones(2, 8), torch.zeros(2).long()))
            seen.setdefault(partition, []).append((left.tolist(), right.tolist()))
            pairs += 1
        assert pairs == loaders[0].num_steps

    run = Stranger(train, strategy)
    assert run.steps == [asked for _, asked, _ in run.replies]
    for pairs in seen.values():
        lefts = [number for left, _ in pairs for number in left]
        assert lefts == [i % 20 for i in range(len(lefts))]
        assert all(right == [100 + number for number in left] for left, right in pairs)


# --- what nodes report -----------------------------------------------------------------------
def weights_of(report, epochs=1):
    """Return the mean weight of each node's replies, by what it reports as its examples."""

    def train(model, msg, partition):
        loader, optimizer, count = hetero.batches(data_of(partition), msg), sgd(model), 0
        for _ in range(epochs):
            for batch in loader:
                step(model, optimizer, batch)
                count += len(batch[1])
        return report(loader, count)

    run = Stranger(train, rounds=4, **{"local-epochs": epochs})
    assert not run.failures
    total = Counter()
    for record in run.history.records:
        total.update(record["weights"])
    return [total[name] / sum(total.values()) for name in sorted(total)]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    "report", [lambda _, n: n, lambda loader, _: len(loader)], ids=["seen", "len"]
)
def test_a_node_weighs_by_its_data_whatever_it_reports(report, epochs):
    usual = weights_of(lambda *_: NUM, epochs)
    assert weights_of(report, epochs) == pytest.approx(usual, rel=0.1)
