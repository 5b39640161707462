"""Every experiment, in its short form."""

import json
import math

import pytest

from flwr_hetero_studies.core.plan import NotHereError, Options
from flwr_hetero_studies.papers.cases import find

RUN = [each for each in find() if each.run]


@pytest.mark.nightly
@pytest.mark.parametrize("experiment", RUN, ids=lambda each: f"{each.paper}-{each.name}")
def test_fast_form_has_rows_claims_and_curves(experiment):
    try:
        found = experiment.run(Options(fast=True))
    except NotHereError as reason:
        pytest.skip(str(reason))
    assert found.rows
    assert json.loads(json.dumps(found.parts))["metrics"]["verdict"] == found.verdict
    assert all(len(row) == len(found.head) for row in found.rows)
    assert 1 <= len(found.claims) <= 4
    for curve in found.curves.values():
        assert len(curve.x) == len(curve.y)
        assert all(map(math.isfinite, [*curve.x, *curve.y]))
