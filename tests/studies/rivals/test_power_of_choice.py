from collections import Counter

import pytest
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import PowerOfChoice

ONLINE = {1000 + i for i in range(4)}


def knowing(losses, examples, **settings):
    """Make a strategy that knows nodes by their ids, as before they have a name."""
    strategy = PowerOfChoice(**settings)
    strategy.loss = {f"id-{1000 + i}": loss for i, loss in losses.items()}
    strategy.examples = {f"id-{1000 + i}": float(n) for i, n in enumerate(examples)}
    return strategy


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ({0: 0.5, 1: 2.0, 2: 1.0, 3: 0.1}, [1001, 1002]),
        ({0: 5.0, 1: 2.0, 3: 9.0}, [1002, 1003]),  # who never trained comes first
    ],
)
def test_largest_losses_of_the_candidates_train(losses, chosen):
    strategy = knowing(losses, [9] * 4, clients_per_round=2, candidates=4)
    assert strategy.select(None, None, ONLINE) == chosen


def test_candidates_are_drawn_by_examples():
    """With d = m it is a draw by examples: no loss counts (section 4)."""
    losses = dict.fromkeys(range(4), 1.0) | {0: 99.0}
    examples = [10, 20, 30, 40]
    strategy = knowing(losses, examples, clients_per_round=1, candidates=1)
    counts = Counter(strategy.select(None, None, ONLINE)[0] for _ in range(4000))
    for i, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert counts[1000 + i] / 4000 == pytest.approx(share, abs=0.03)


def test_losses_are_learnt_in_training():
    """All train once, then the two of the largest losses that were reported last."""
    strategy = History(PowerOfChoice(fedavg(), 2, 6))
    known = {}
    strategy.start(LocalGrid(toy_app(), [DeviceProfile()] * 6), toy_arrays(), 9)
    for number, record in enumerate(strategy.records[1:]):
        if number < 3:
            assert not known.keys() & set(record["selected"])
        else:
            assert len(known) == 6
            assert set(record["selected"]) == set(sorted(known, key=known.get)[-2:])
        known |= record["power_of_choice"]["loss"]
