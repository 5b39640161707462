"""Checks of arguments, and text of nodes."""

import numpy as np
import pytest

from flwr_hetero import errors
from flwr_hetero import sampler as samplers
from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.records import read_number

HUGE = [10**400, -(10**400), 10**5000]
NUMBERS = {
    "rate_correction": lambda value: ours.FedSlice(rate_correction=value),
    "staleness": lambda value: ours.FedBuff(staleness=value),
    "compute": lambda value: DeviceProfile(value),
    "policy": lambda value: ours.TiFL(policy=[value, 0, 0, 0, 0]),
    "share": lambda value: ours.Resharding(share=value, budget_bytes=16),
    "high_loss_fraction": lambda value: samplers.TopLossSampler(4, 2, high_loss_fraction=value),
}
COUNTS = {
    "concurrency": lambda value: ours.FedBuff(concurrency=value),
    "clients_per_round": lambda value: ours.TiFL(clients_per_round=value),
    "num_samples": lambda value: samplers.MercurySampler(value, 2),
    "seed of a sampler": lambda value: samplers.PGDSampler(4, 2, seed=value),
    "seed of a grid": lambda value: LocalGrid(None, [DeviceProfile()], seed=value),
    "seed": lambda value: ours.FedSlice(seed=value),
}


@pytest.mark.parametrize("value", HUGE, ids=["1e400", "-1e400", "1e5000"])
@pytest.mark.parametrize("name", [*NUMBERS, *COUNTS])
def test_a_number_beyond_all_floats_is_refused(name, value):
    with pytest.raises(ValueError, match=name.split()[0]) as caught:
        (NUMBERS | COUNTS)[name](value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [None, "3", -1, 1.0, True, [3], np.random.default_rng(0)])
@pytest.mark.parametrize("name", [name for name in COUNTS if name.startswith("seed")])
def test_a_seed_is_a_whole_number(name, value):
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        COUNTS[name](value)


def test_the_id_of_a_node_is_a_seed():
    assert errors.check_count("seed", 2**64 - 1) == 2**64 - 1
    assert errors.check_count("seed", np.uint64(2**64 - 1)) == 2**64 - 1
    assert errors.check_number("x", 10**300, "(0, inf)") == 1e300


@pytest.mark.parametrize(
    ("value", "found"), [(10**400, 1e18), (-(10**400), -1e18), (3, 3.0), (True, 7.0), (np.inf, 7.0)]
)
def test_numbers_of_nodes_are_cut(value, found):
    assert read_number({"a": value}, "a", 7.0) == found


HOSTILE = "\x1b]0;title\x07 a\x9b2J\u202eb\u2066c\u2028d\x7f\ud800 \u200b"


def test_text_of_nodes_is_printable_and_short():
    text = errors.clean(HOSTILE + "x" * 1000)
    assert len(text) == 200
    assert text.isprintable()
    assert text.startswith("?]0;title? a?2J?b?c?d?? ?x")
    assert errors.clean("Größe 5 µs, 準確率") == "Größe 5 µs, 準確率"
    assert errors.last_line(f"Traceback\n{HOSTILE}\n\n").isprintable()
