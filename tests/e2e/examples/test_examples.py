"""Each method in apps of five kinds: its effect, or its error."""

import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from e2e.examples.methods import METHODS, MISSING, REFUSED
from e2e.examples.running import APPS, run, train_once
from e2e.examples.table import made, parts
from flwr.app import ArrayRecord

from flwr_hetero_studies.cost.apps import overheads

MODELS = {
    "scikit-learn": [np.zeros((10, 64)), np.zeros(10)],
    "xgboost": [np.frombuffer(b"", np.uint8)],
}


@pytest.fixture(scope="module")
def plain_s(tmp_path_factory):
    """Give a function that says how long an app runs under FedAvg, on the fleet's clock."""

    @cache
    def seconds(kind, rounds):
        return run(APPS[kind], tmp_path_factory.mktemp("plain"), rounds=rounds).grid.virtual_time_s

    return seconds


def case(kind, name):
    """Make a parameter: by day one method for each node's half, but in the torch app all."""
    is_repeated = name != "LocalSteps" and METHODS[name].half in (None, "steps")
    marks = [pytest.mark.nightly] if is_repeated and kind != "torch" else []
    if kind in ("lightning", "hugging-face"):
        marks.append(pytest.mark.filterwarnings("ignore"))
    return pytest.param(kind, name, marks=marks)


def open_app(kind):
    for name in APPS[kind].needs:
        pytest.importorskip(name)
    return APPS[kind]


@pytest.mark.parametrize(("kind", "name"), [case(*both) for both in product(APPS, METHODS)])
def test_effect_or_error(kind, name, tmp_path, plain_s):
    app = open_app(kind)
    method = METHODS[name]
    if (refusal := REFUSED.get((kind, name))) is None:
        seen = run(app, tmp_path, method.wrapped, method.half, method.rounds)
        method.check(seen, plain_s(kind, method.rounds))
    elif method.wrapped:
        with pytest.raises(refusal.error, match=re.escape(refusal.text)):
            run(app, tmp_path, method.wrapped, method.half)
    else:  # the node alone has it
        reply = train_once(app, tmp_path, method.half, ArrayRecord(MODELS[kind]))
        assert f"{refusal.error.__name__}: {refusal.text}" in reply.error.reason


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "name"), list(product(APPS, MISSING)))
def test_error_without_the_nodes_half(kind, name, tmp_path):
    app = open_app(kind)
    refusal = REFUSED.get((kind, name), MISSING[name])
    with pytest.raises(refusal.error, match=re.escape(refusal.text)):
        run(app, tmp_path, METHODS[name].wrapped, rounds=1)


def test_table_of_the_docs_is_that_of_the_apps():
    found = overheads()
    assert set(found) == set(APPS)
    for kind in found:
        # The record also has rivals that the page leaves out.
        measured = set(found[kind]).intersection(METHODS)
        assert measured == {name for name in METHODS if (kind, name) not in REFUSED}
    assert set(REFUSED) < {(kind, name) for kind in APPS for name in METHODS}
    assert parts()[1] == made(found)
