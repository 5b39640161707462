"""Every experiment, in its short form."""

import math

import pytest

from flwr_hetero_studies.core import catalogue
from flwr_hetero_studies.core.experiment import NotHereError, Options

RUN = [each for each in catalogue.find() if each.run]


@pytest.mark.nightly
@pytest.mark.parametrize("experiment", RUN, ids=lambda each: f"{each.paper}-{each.name}")
def test_fast_form_has_rows_claims_and_curves(experiment):
    try:
        found = experiment.run(Options(fast=True, say=lambda text: None))
    except NotHereError as reason:
        pytest.skip(str(reason))
    assert found.rows
    assert all(len(row) == len(found.head) for row in found.rows)
    assert 1 <= len(found.claims) <= 4
    for curve in found.curves.values():
        assert len(curve.x) == len(curve.y)
        assert all(map(math.isfinite, [*curve.x, *curve.y]))
