"""The node's half: what it reports, local epochs, samplers, code without a loader or a mod."""

from collections import UserDict
from math import nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from node_toy import BATCH, NUM, Node, plain, report
from quadratics import fedavg, start
from recording import History
from torch.utils.data import DataLoader, TensorDataset
from toy import reply_with, rewriting

from flwr_hetero import keys
from flwr_hetero.client import work as work_module
from flwr_hetero.client.session import current_session
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import StepLoader, hetero
from flwr_hetero.strategy import LocalSteps


class Endless:
    def __iter__(self):
        while True:
            yield "a b c"


def loop(epochs=1, *, look=False, anew=False, stop=99, make=plain):
    """Make an app's loop over epochs; it returns the lengths of its passes."""

    def train(msg, context):
        loader = hetero.batches(make(), msg)
        lengths = []
        if look:
            next(iter(loader))
        for _ in range(epochs):
            passed = iter(hetero.batches(make(), msg) if anew else loader)
            lengths.append(sum(1 for _ in zip(range(stop), passed, strict=False)))
        return lengths

    return train


def stated(**how):
    # again in the same message changes nothing
    return lambda msg, _: [hetero.num_steps(msg, **how) for _ in range(2)]


WRONG = (0, 2.5, True, "two")
EPOCHS = {n: {"local-epochs": n} for n in (*WRONG, 2, 3, 5)}
SAID = {
    "a pass": (loop(), {}, [(2, [2], report(2)), (20, [20], report(20)), (None, [6], report(6))]),
    "epochs": (
        loop(3),
        EPOCHS[3],
        [
            *[(7, [2] * 3, report(6, 3, 18)), (3, [1] * 3, report(3, 3, 18))],
            *[(2, [1] * 3, report(3, 3, 18)), (None, [6] * 3, report(18, 3, 18))],
        ],
    ),
    "fewer epochs than planned": (
        loop(2), EPOCHS[5],
        [(10, [2, 2], report(4, 2, 12)), (10, [5, 5], report(10, 2, 12))],
    ),
    "more than planned": (
        loop(3), {}, [(6, [6, 1, 1], report(8, 3, 18)), (6, [2, 2, 2], report(6, 3, 18))],
    ),
    "a loader for each epoch": (loop(2, anew=True), EPOCHS[2], [(8, [4, 4], report(8, 2, 12))]),
    "a look": (
        loop(2, look=True), {}, [(9, [8, 1], report(10, 2, 12)), (9, [4, 3], report(8, 2, 12))],
    ),
    "broken off": (loop(3, stop=2), {}, [(20, [2] * 3, report(6)), (None, [2] * 3, report(6))]),
    "no lengths": (loop(make=Endless), {}, [(3, [3], report(3, 1, None, None))]),
    "an iterator": (loop(make=lambda: iter("abc")), {}, [(None, [3], report(3, 1, 3, None))]),
    "no loop": (lambda msg, _: None, {}, [(3, None, {})]),
    "a loader that is not used": (loop(0), {}, [(3, [], {})]),
    **{f"epochs {n}": (loop(), EPOCHS[n], [(6, [6], report(6))]) for n in WRONG},
    "told": (stated(), {}, [(5, [5, 5], report(5, 1, None, None)), (None, [None] * 2, {})]),
    "told, sizes": (
        stated(default=9, batch_size=8),
        {},
        [(5, [5, 5], report(5, 1, 9, 8)), (None, [9, 9], report(9, 1, 9, 8))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_the_reply_says_what_was_done(name):
    function, config, messages = SAID[name]
    node = Node(function, **config)
    for asked, lengths, work in messages:
        assert node.work(asked) == work
        assert node.results[-1] == lengths


@pytest.mark.parametrize(("steps", "seconds"), [(1, 9.0), (4, 2.0)])
def test_a_step_takes_what_the_clock_says_without_the_first(steps, seconds, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train(msg, context):
        for number, _ in enumerate(hetero.batches(plain(), msg)):
            now[0] += 2.0 if number else 9.0
        now[0] += 100.0  # evaluates its model
        return current_session().work.finish()[keys.WORK][keys.STEP_TIME]

    node = Node(train)
    node.ask(steps)
    assert node.results == [seconds]


def test_an_emulated_device_has_its_own_clock_and_works_for_its_steps():
    node = Node(loop(), profile=DeviceProfile(0.5, seconds_per_example=0.1))
    content = node.ask(2).content
    assert content[keys.WORK][keys.STEP_TIME] == pytest.approx(BATCH * 0.1 / 0.5)
    assert content[keys.TIMING][keys.TRAIN_TIME] == pytest.approx(2 * BATCH * 0.1 / 0.5)


def test_epochs_go_on_in_one_pass_over_the_data():
    def train(msg, context):
        loader = hetero.batches(DataLoader(range(NUM), BATCH, shuffle=True), msg)
        assert len(loader) == 2  # by which apps divide their loss
        return [number for _ in range(2) for batch in loader for number in batch.tolist()]

    node = Node(train, **EPOCHS[2])
    for _ in range(3):
        node.ask(4)
    seen = [number for numbers in node.results for number in numbers]
    assert sorted(seen[:NUM]) == sorted(seen[NUM:]) == list(range(NUM))


def metrics_of(own=None, claim=None):
    """Return what LocalSteps notes of an app that reports metrics of its own; ``claim``: steps."""

    def spoil(partition, message, reply):
        reply.content[keys.WORK].update({} if claim is None else {"num-steps": claim})

    def train(msg, context):
        list(hetero.batches(plain(), msg))
        metrics = {"num-examples": NUM, **(own or {})}
        return reply_with(msg, metrics, dict(msg.content["arrays"]))

    app = ClientApp(mods=[rewriting(spoil), hetero])
    run = History(LocalSteps(fedavg(), fast_steps=3))
    app.train()(train)
    run.start(LocalGrid(app, [DeviceProfile()] * 3), start(np.zeros(2)), num_rounds=2)
    return run.records[-1]["train"]


def test_the_server_takes_the_work_for_the_metrics():
    found = metrics_of()
    assert (found["num-steps"], found["examples-processed"]) == (3, 3 * BATCH)
    assert metrics_of({"num-steps": 2})["num-steps"] == 2  # the app's own counts
    assert metrics_of(claim=10**6)["num-steps"] <= 3


@pytest.mark.parametrize("value", [nan, -1, 2.0**60, "many", True])
def test_nonsense_is_no_report(value):
    with pytest.raises(RuntimeError, match="num-steps"):
        metrics_of(claim=value)


NUMBERS = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))


def load(loader, steps=None):
    return StepLoader(loader, {} if steps is None else {"num-steps": steps})


def test_nothing_asked_is_the_loader_itself():
    plain = DataLoader(NUMBERS, batch_size=4)
    loader = load(plain)
    assert [len(targets) for epoch in range(2) for _, targets in loader] == [4, 4, 2, 4, 4, 2]
    assert loader.metrics == {"num-steps": 6, "examples-processed": 20}
    assert (len(loader), loader.num_steps) == (3, None)
    assert loader.batch_sampler is plain.batch_sampler


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"scale": torch.tensor(1.0), "images": np.zeros((3, 2))}, 3),
        (UserDict(input_ids=torch.zeros(3, 7)), 3),  # as Hugging Face's BatchEncoding
        ((["a", "b", "c"], {"labels": [torch.zeros(3)]}), 3),
        (torch.zeros(0, 2), 0),
        *[(untold, None) for untold in (SimpleNamespace(), ["a", "b"], torch.tensor(1.0))],
    ],
)
def test_examples_of_any_batch_that_tells_them(batch, examples):
    loader = load([batch, torch.zeros(5)])
    list(loader)
    counted = {} if examples is None else {"examples-processed": examples + 5}
    assert loader.metrics == {"num-steps": 2, **counted}


@pytest.mark.parametrize(
    ("loader", "good"),
    [([], 0), (DataLoader(NUMBERS, batch_size=16, drop_last=True), 0), (iter([1, 2]), 2)],
)
def test_a_pass_without_a_batch_is_an_error(loader, good):
    batches = iter(load(loader, 3))
    assert [next(batches) for _ in range(good)] == [1, 2][:good]
    with pytest.raises(ValueError, match=r"loader must give a batch .* not an iterator"):
        next(batches)


@pytest.mark.parametrize("number", [0, -1, 2.5, "many"])
def test_bad_arguments_are_refused(number):
    with pytest.raises(ValueError, match="num-steps must be a whole"):
        load([1], number)
    for how in ({"default": number}, {"batch_size": number}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            hetero.num_steps({}, **how)
    with pytest.raises(ValueError, match="msg must be the message passed to the Client"):
        StepLoader([1], Context(1, 1, {}, RecordDict(), {}))
