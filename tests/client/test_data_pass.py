"""A node's pass over its data goes on from message to message, whatever the loader."""

import random

import numpy as np
import pytest
import torch
from node_toy import Node
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from flwr_hetero.client import _warned
from flwr_hetero.mod import hetero

NUM = 20


class Stream(IterableDataset):
    """Numbers in an order of the global generators, a draw for each."""

    def __init__(self, draw=None):
        self.draw = draw

    def __iter__(self):
        left = list(range(NUM))
        while left:
            yield left.pop(self.draw(len(left)) if self.draw else 0)


class ByEpoch(Sampler):
    """An order of its own for each epoch that it is told, as torch's distributed sampler."""

    epoch = 0

    def __len__(self):
        return NUM

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from np.random.default_rng(self.epoch).permutation(NUM).tolist()


class Pairs(Sampler):
    """A batch sampler of its own, without a size to read."""

    def __iter__(self):
        order = random.sample(range(NUM), NUM)
        for start in range(0, NUM, 2):
            yield order[start : start + 2]

    def __len__(self):
        return NUM // 2


class OwnLoader:
    """No DataLoader, but one inside."""

    def __iter__(self):
        yield from DataLoader(range(NUM), 3, shuffle=True)


def loader(data=None, batch_size=3, **options):
    def make():
        made = {key: value() if callable(value) else value for key, value in options.items()}
        return DataLoader(data or range(NUM), batch_size, **made)

    return make


SHUFFLED = {
    "shuffled": loader(shuffle=True),
    "workers": loader(shuffle=True, num_workers=2),
    "custom": loader(sampler=ByEpoch),
    "batch sampler": lambda: DataLoader(range(NUM), batch_sampler=Pairs()),
    "shuffled stream": loader(data=Stream(lambda n: int(torch.randint(n, ())))),
    "stream by NumPy": loader(data=Stream(np.random.randint), batch_size=None),
    "own loader": OwnLoader,
}
LOADERS = SHUFFLED | {
    "in order": loader(),
    "stream": loader(data=Stream()),
    "list": lambda: [torch.arange(i, min(i + 3, NUM)) for i in range(0, NUM, 3)],
}


def node(make, *, seeded=True, **options):
    """Make a node that notes the batches of each message and, as many do, seeds itself."""

    def train(msg, context):
        if seeded:
            torch.manual_seed(42)
            np.random.seed(42)  # noqa: NPY002
            random.seed(42)
        given = [np.atleast_1d(batch).tolist() for batch in hetero.batches(make(), msg)]
        return given, (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002

    return Node(train, **options)


def run(make, steps, **options):
    """Let a node answer messages of these numbers of steps; return the batches of each."""
    asked_node = node(make, **options)
    for asked in steps:
        asked_node.ask(asked)
    return [given for given, _ in asked_node.results]


def flat(lists):
    return [item for part in lists for item in part]


def passes_of(given, full):
    batches = flat(given)
    return [flat(batches[i : i + full]) for i in range(0, len(batches) - full + 1, full)]


def is_whole(one_pass):
    return sorted(one_pass) == list(range(NUM))


@pytest.mark.parametrize("name", LOADERS)
def test_every_example_once_in_a_pass_however_few_steps(name):
    full = len(list(LOADERS[name]()))
    rest = 3 * full - 7
    steps = [1, 1, 2, 3, rest // 2, rest - rest // 2]
    given = run(LOADERS[name], steps)
    assert [len(message) for message in given] == steps
    passes = passes_of(given, full)
    assert all(map(is_whole, passes))
    assert len(set(map(tuple, passes))) == (3 if name in SHUFFLED else 1)


@pytest.mark.parametrize("name", LOADERS)
def test_the_same_seed_gives_the_same_run(name):
    """And one message the same batches as several, with whole passes without the app's seed too."""
    first = run(LOADERS[name], [2, 12], seeded=False)
    assert first == run(LOADERS[name], [2, 12], seeded=False)
    assert all(map(is_whole, passes_of(first, len(list(LOADERS[name]())))))
    if name != "workers":
        assert flat(first) == flat(run(LOADERS[name], [14], seeded=False))
    if name in set(SHUFFLED) - {"custom"}:
        assert run(LOADERS[name], [2], seeded=False, seed=1) != first[:1]


@pytest.mark.parametrize("name", ["shuffled stream", "stream by NumPy"])
def test_what_the_user_seeded_is_put_back(name):
    one = node(LOADERS[name])
    other = node(LOADERS[name])
    one.ask(1), one.ask(3), other.ask(2), other.ask(5)
    assert one.results[1][1] == other.results[1][1]  # whatever the loader drew


def test_drop_last_leaves_out_another_rest_each_pass():
    passes = passes_of(run(loader(shuffle=True, drop_last=True), [2] * 9), 6)
    assert all(len(set(one)) == 18 for one in passes)
    assert len({tuple(sorted(one)) for one in passes}) > 1


def test_draws_with_replacement_stay_draws():
    sampler = lambda: WeightedRandomSampler([1.0] * 10 + [0.0] * 10, NUM)  # noqa: E731
    given = run(loader(sampler=sampler), [4] * 5)
    assert set(flat(flat(given))) <= set(range(10))
    assert len({tuple(flat(message)) for message in given}) == 5


def test_unasked_the_loaders_own_passes_are_given():
    torch.manual_seed(42)
    wanted = [batch.tolist() for batch in LOADERS["shuffled"]()]
    given = run(LOADERS["shuffled"], [0, 0, 2, 0])
    assert given[0] == given[1] == given[3] == wanted


@pytest.mark.parametrize(
    "other", [loader(data=range(12)), loader(batch_size=5), lambda: [[1], [2], [3]]]
)
def test_other_data_or_batches_begin_a_new_pass(other):
    loaders = iter([LOADERS["in order"], LOADERS["in order"], other])
    given = run(lambda: next(loaders)(), [2, 2, 3])
    assert given[2] == [np.atleast_1d(batch).tolist() for batch in other()][:3]


def test_without_a_mod_or_a_second_pass_each_message_begins_again(caplog):
    _warned.clear()
    assert run(lambda: iter([1, 2, 3]), [2, 2]) == [[[1], [2]]] * 2
    assert not caplog.records
    given = run(LOADERS["in order"], [2, 2], mods=[])
    assert given[0] == given[1]
    (record,) = caplog.records
    assert "app = ClientApp(mods=[hetero])" in record.message
