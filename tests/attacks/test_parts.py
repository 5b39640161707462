"""Which arrays are trained is what most nodes return: a few neither set it nor end a run."""

import logging

import numpy as np
import pytest
from attacker import BY_NIGHT, NESTS, leaf, names_of, reasons
from attacker import trained as in_training
from flwr.app import Array
from parts_toy import changed, frozen_arrays, run, seen_by, whole_model

from flwr_hetero import strategy as ours
from flwr_hetero.errors import HINTS
from flwr_hetero.exchange.aggregate import check_arrays
from flwr_hetero.exchange.context import NoProgressError

LIAR = 4
ALL = range(6)


def returning(*more, less=(), value=1000.0):
    """Make a lie: arrays that others do not return, full of a value, and without some."""

    def lie(message, reply):
        arrays = reply.content["arrays"]
        for name in more:
            like = whole_model()[name].numpy()
            arrays[name] = Array(np.full(like.shape, value, like.dtype))
        for name in less:
            del arrays[name]

    return in_training(lie)


def weights_of(records, partition):
    return [record["weights"].get(f"node-{partition}", 0.0) for record in records]


@pytest.mark.parametrize("nest", BY_NIGHT)
def test_one_that_returns_more_than_most(nest):
    lie = returning("a.base", "y.running_var")
    records, models = run(NESTS[nest](leaf()), lies={LIAR: lie})
    assert not any(map(changed, models))
    # what most return of it counts
    assert any(weights_of(records, LIAR))
    (reason,) = reasons(records, LIAR)
    assert "['a.base', 'y.running_var'], which most nodes leave out" in reason


@pytest.mark.parametrize("nest", BY_NIGHT)
def test_one_that_leaves_out_what_most_return(nest):
    lie = returning("a.base", less=["w"])
    records, models = run(NESTS[nest](leaf()), lies={LIAR: lie})
    assert not any(map(changed, models))
    assert not any(weights_of(records, LIAR))
    assert any("leaves out arrays ['w'], which most" in text for text in reasons(records, LIAR))
    assert {f["node"] for record in records for f in record["failures"]} <= names_of(LIAR)
    assert models[-1]["w"].numpy().all()


@pytest.mark.parametrize("name", ["FedSlice", "FedBuff"])
def test_the_first_to_answer_set_nothing(name):
    """Two of six are the first: what they change is undone when most have a vote."""
    how = {"FedSlice": {"slice_steps": 4}, "FedBuff": {"buffer_size": 2}}[name]
    lies = dict.fromkeys((0, 1), returning("a.base", value=0.5))
    sent = []
    _, models = run(getattr(ours, name)(leaf(), **how), lies=lies, mods=[seen_by(sent)])
    assert any(map(changed, sent))
    assert not changed(models[-1])
    assert models[-1]["w"].numpy().all()


def test_no_array_that_most_return():
    lies = {i: returning([*frozen_arrays()][i % 5], less=["w"]) for i in ALL}
    with pytest.raises(NoProgressError) as caught:
        run(ours.Wrapper(leaf()), lies=lies)
    assert "leave out all that it returns, of initial_arrays ['a.base', 'b.half'" in str(
        caught.value
    )
    assert HINTS["missing or unknown|of initial_arrays"] in str(caught.value)


@pytest.mark.parametrize("nest", ["none", "Compressed", "FedBuff"])
def test_most_return_other_arrays_from_a_round_on(nest, caplog):
    """The new set counts from then on; what is no longer returned keeps its last value."""
    caplog.set_level(logging.INFO, "flwr")

    def lie(message, reply):
        number = message.content["config"]["server-round"]
        arrays = reply.content["arrays"]
        if number < 3:
            like = whole_model()["a.base"].numpy()
            arrays["a.base"] = Array(np.full(like.shape, 0.1 * number, like.dtype))

    records, models = run(
        NESTS[nest](leaf()), lies=dict.fromkeys(ALL, in_training(lie)), rounds=6, logs=True
    )
    values = [model["a.base"].data for model in models]
    assert len({*values[:3]}) == 3
    assert len({*values[-3:]}) == 1
    assert values[-1] != whole_model()["a.base"].data
    assert len({model["w"].data for model in models[:-1]}) == 7
    assert records[-1]["weights"]
    found = [r.message for r in caplog.records if "are not returned" in r.message]
    assert [text[:6] for text in found] == ["4 of 6", "5 of 6"]


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"0": 1.0}, ["1"]),  # of a list: which ones are left out is not known
        ({}, ["0", "1"]),
        ({"0": 1.0, "2": 1.0}, ["2"]),
    ],
)
def test_what_a_part_may_not_be(returned, named):
    arrays, sent = (
        {k: Array(np.array(v)) for k, v in x.items()} for x in (returned, {"0": 1.0, "1": 1.0})
    )
    with pytest.raises(ValueError, match=r"missing or unknown") as caught:
        check_arrays(arrays, sent)
    assert f"arrays {named} missing" in str(caught.value)
