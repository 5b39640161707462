"""A node's pass over its data goes on from message to message, whatever the loader."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from flwr_hetero import keys
from flwr_hetero.client.handler import _said
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero, timing

NUM = 20


class Numbers(Dataset):
    """Example i is the number i."""

    def __init__(self, size=NUM):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)
        return index


class Stream(IterableDataset):
    """Numbers in an order of the global generators, a draw for each."""

    def __init__(self, draw=None):
        self.draw = draw

    def __iter__(self):
        left = list(range(NUM))
        while left:
            yield left.pop(self.draw(len(left)) if self.draw else 0)


class Entropy(Sampler):
    """An order that no seed repeats."""

    def __len__(self):
        return NUM

    def __iter__(self):
        yield from np.random.default_rng().permutation(NUM).tolist()


class ByEpoch(Sampler):
    """As torch's DistributedSampler: the same order until it is told the epoch."""

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
        order = list(range(NUM))
        random.shuffle(order)
        for start in range(0, NUM, 2):
            yield order[start : start + 2]

    def __len__(self):
        return NUM // 2


class Reversed(DataLoader):
    """A loader with batches of its own making."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch.flip(0)


class OwnLoader:
    """No DataLoader, but one inside."""

    def __iter__(self):
        yield from DataLoader(Numbers(), 3, shuffle=True)


def own_generator():
    return torch.Generator().manual_seed(7)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), 3),
    "shuffled": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "workers": lambda: DataLoader(Numbers(), 3, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        Numbers(), 3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "own generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=own_generator()),
    "one by one": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "custom": lambda: DataLoader(Numbers(), 3, sampler=ByEpoch()),
    "entropy": lambda: DataLoader(Numbers(), 3, sampler=Entropy()),
    "entropy, one by one": lambda: DataLoader(Numbers(), batch_size=None, sampler=Entropy()),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Pairs()),
    "subclass": lambda: Reversed(Numbers(), 3, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 3),
    "shuffled stream": lambda: DataLoader(Stream(lambda n: int(torch.randint(n, ()))), 3),
    "stream by NumPy": lambda: DataLoader(Stream(np.random.randint), batch_size=None),
    "stream by Python": lambda: Stream(random.randrange),
    "own loader": OwnLoader,
    "list": lambda: [torch.arange(i, min(i + 3, NUM)) for i in range(0, NUM, 3)],
}
SHUFFLED = set(LOADERS) - {"in order", "stream", "list"}


def node_app(make, *, seeded=True, mods=(hetero,), use=hetero.batches, passes=1, seen=None):
    """Make an app that notes the examples of each message and, as many do, seeds itself."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        if seeded:
            torch.manual_seed(42)
            np.random.seed(42)  # noqa: NPY002
            random.seed(42)
        loader = use(make(), msg)
        given = [np.atleast_1d(batch).tolist() for _ in range(passes) for batch in loader]
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        seen.append((given, drawn))
        return Message(RecordDict(), reply_to=msg)

    return app


def run(make, steps, *, state=None, seed=0, **how):
    """Let a node answer messages of so many steps; return the batches of each."""
    seen = []
    grid = LocalGrid(node_app(make, seen=seen, **how), [DeviceProfile()], seed=seed)
    (node,) = grid.get_node_ids()
    for number, asked in enumerate(steps):
        if state is not None:
            state(number, grid.context(node).state)
        config = ConfigRecord({"server-round": number} | ({"num-steps": asked} if asked else {}))
        (reply,) = grid.send_and_receive([Message(RecordDict({"c": config}), node, "train")])
        assert not reply.has_error(), reply.error.reason
    return [given for given, _ in seen], [drawn for _, drawn in seen]


def examples(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_every_example_once_in_a_pass_however_few_steps(name, seeded):
    full = len(list(LOADERS[name]()))
    steps = [*[1] * 3, 2, 3] * (3 * full // 8 + 1)
    given, _ = run(LOADERS[name], steps, seeded=seeded)
    assert [len(message) for message in given] == steps
    batches = [batch for message in given for batch in message]
    passes = [examples(batches[i : i + full]) for i in range(0, 3 * full, full)]
    assert all(sorted(one) == list(range(NUM)) for one in passes)
    orders = {tuple(one) for one in passes}
    assert len(orders) == (3 if name in SHUFFLED else 1)


@pytest.mark.parametrize("name", sorted(set(LOADERS) - {"entropy", "entropy, one by one"}))
def test_the_same_seed_gives_the_same_run(name):
    one, other = (run(LOADERS[name], [2, 5, 9], seeded=False) for _ in range(2))
    assert one == other
    if name in SHUFFLED - {"custom", "own generator"}:
        assert run(LOADERS[name], [2, 5, 9], seeded=False, seed=1)[0] != one[0]


@pytest.mark.parametrize("name", ["shuffled", "shuffled stream", "stream by Python", "own loader"])
def test_one_message_or_several_make_no_difference(name):
    whole, _ = run(LOADERS[name], [17])
    parts, _ = run(LOADERS[name], [4, 1, 12])
    assert [batch for part in parts for batch in part] == whole[0]


@pytest.mark.parametrize("name", ["shuffled stream", "stream by NumPy", "stream by Python"])
def test_what_the_user_seeded_is_put_back(name):
    _, drawn = run(LOADERS[name], [1, 3])
    assert drawn[1] == run(LOADERS[name], [2, 5])[1][1]  # whatever the loader drew


def test_drop_last_leaves_out_another_rest_each_pass():
    given, _ = run(lambda: DataLoader(Numbers(), 3, shuffle=True, drop_last=True), [2] * 9)
    batches = [batch for message in given for batch in message]
    passes = [examples(batches[i : i + 6]) for i in (0, 6, 12)]
    assert all(len(set(one)) == 18 for one in passes)
    assert len({tuple(sorted(one)) for one in passes}) > 1


def test_draws_with_replacement_stay_draws():
    weights = [1.0] * 10 + [0.0] * 10
    make = lambda: DataLoader(Numbers(), 3, sampler=WeightedRandomSampler(weights, NUM))  # noqa: E731
    given, _ = run(make, [4] * 5)
    assert set(examples(batch for message in given for batch in message)) <= set(range(10))
    assert len({tuple(examples(message)) for message in given}) == 5


def test_unasked_the_loaders_own_passes_are_given():
    plain = DataLoader(Numbers(), 3, shuffle=True)
    torch.manual_seed(42)
    wanted = [batch.tolist() for batch in plain]
    given, _ = run(LOADERS["shuffled"], [0, 0, 2, 0])
    assert given[0] == given[1] == given[3] == wanted


def damaged(key, value):
    def damage(number, state):
        if number == 2:
            state[keys.PASS][key] = value

    return damage


LOST = {
    "lost": lambda number, state: state.pop(keys.PASS, None) if number == 2 else None,
    "no number": damaged("position", "soon"),
    "negative": damaged("position", -3),
    "far": damaged("position", 2**61),
    "past the end": damaged("position", 10_000),
    "other kind": lambda number, state: state.update(
        {keys.PASS: ArrayRecord({"a": Array(np.zeros(1))})} if number == 2 else {}
    ),
}


@pytest.mark.parametrize("name", ["shuffled", "list", "entropy"])
@pytest.mark.parametrize("how", LOST)
def test_a_lost_or_damaged_place_is_a_new_pass(name, how):
    given, _ = run(LOADERS[name], [2, 2, 7], state=LOST[how])
    assert sorted(examples(given[2])) == list(range(NUM))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("order", b"abc"), ("order", b"\xff" * 80), ("order", b"\x7f" * 80)],
        *[("lengths", b""), ("lengths", b"\x01\0\0\0" * 3), ("lengths", 5)],
    ],
)
def test_a_damaged_order_is_a_new_pass(key, value):
    given, _ = run(LOADERS["entropy"], [2, 2, 7], state=damaged(key, value))
    assert sorted(examples(given[2])) == list(range(NUM))


@pytest.mark.parametrize(
    "other",
    [lambda: DataLoader(Numbers(12), 3), lambda: DataLoader(Numbers(), 5), lambda: [[1], [2], [3]]],
)
def test_other_data_or_batches_begin_a_new_pass(other):
    loaders = iter([LOADERS["in order"], LOADERS["in order"], other])
    given, _ = run(lambda: next(loaders)(), [2, 2, 3])
    assert given[2] == [np.atleast_1d(batch).tolist() for batch in other()][:3]


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_accelerate_prepared(workers):
    accelerate = pytest.importorskip("accelerate")

    def make():
        plain = DataLoader(Numbers(), 3, shuffle=True, num_workers=workers)
        return accelerate.Accelerator(cpu=True).prepare(plain)

    given, _ = run(make, [1, 2, 4, 7])
    batches = [batch for message in given for batch in message]
    passes = [examples(batches[i : i + 7]) for i in (0, 7)]
    assert all(sorted(one) == list(range(NUM)) for one in passes)
    assert passes[0] != passes[1]


def test_an_iterator_has_one_pass():
    given, _ = run(lambda: iter([1, 2, 3]), [2, 2])
    assert given == [[[1], [2]]] * 2


def test_timing_and_the_loader_by_its_old_name_do_the_same():
    from flwr_hetero.mod import StepLoader

    one, _ = run(LOADERS["shuffled"], [2, 3])
    assert run(LOADERS["shuffled"], [2, 3], mods=[timing], use=StepLoader)[0] == one


def test_without_a_mod_it_is_said_once(caplog):
    _said.clear()
    given, _ = run(LOADERS["in order"], [2, 2], mods=[])
    assert given[0] == given[1]
    (record,) = caplog.records
    assert "app = ClientApp(mods=[hetero])" in record.message


def test_nodes_of_one_seed_count_alike():
    seen = []
    grid = LocalGrid(node_app(LOADERS["shuffled"], seen=seen), [DeviceProfile()] * 2)
    for _ in range(7):
        config = ConfigRecord({"num-steps": 2})
        messages = [
            Message(RecordDict({"c": config}), node, "train") for node in grid.get_node_ids()
        ]
        grid.send_and_receive(messages)
    for node in range(2):
        mine = examples(batch for given, _ in seen[node::2] for batch in given)
        assert max(Counter(mine).values()) == 2
        assert min(Counter(mine).values()) == 2
