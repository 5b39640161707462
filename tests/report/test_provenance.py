import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_hetero.report.run_dir import command_line, plain, settings_of

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.floats(width=32).map(np.float32),
    st.integers(-100, 100).map(np.int16),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.frozensets(st.integers(), max_size=3),
)
facts = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(facts)
def test_whatever_it_is_it_becomes_json_and_stays(value):
    once = plain(value)
    assert plain(once) == once
    assert json.loads(json.dumps(once, allow_nan=False)) == once


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64("inf"), None),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(3.5), 3.5),
        ((1, float("nan")), [1, None]),
        ({3, 1, 2}, [1, 2, 3]),
        (Path("/data"), "/data"),
        ({1: {"a": np.int64(2)}}, {"1": {"a": 2}}),
    ],
)
def test_plain_by_hand(value, expected):
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_secrets_are_not_written():
    arguments = [
        "flwr-serverapp",
        "--insecure",
        "--token",
        "-s3cret",
        "--api-key=s3cret",
        "--run",
        "7",
    ]
    command = command_line(arguments)
    assert "s3cret" not in command
    assert "--insecure" in command
    assert command.endswith("--run 7")
    settings = settings_of({"HF_TOKEN": "s3cret", "db.password": "s3cret", "num_tiers": 5})
    assert "s3cret" not in str(settings)
    assert settings["num-tiers"] == 5
