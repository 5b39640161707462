"""Every experiment: in the committed record, and in its short form."""

import json

import pytest

from flwr_hetero_studies.core.bench import CLAIMS
from flwr_hetero_studies.core.criteria import PAIRS
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.record import read
from flwr_hetero_studies.papers.cases import find

RUN = [each for each in find() if each.run]


def test_every_experiment_is_recorded_or_says_why_not():
    known = {(x["case"]["experiment"], x["case"]["name"]) for x in read(CLAIMS["papers"])}
    assert known == {(x.paper, x.name) for x in RUN}
    assert {x["case"]["seeds"] for x in read(CLAIMS["papers"])} == {1, PAIRS}
    assert len(RUN) >= 30
    assert len({(each.paper, each.name) for each in find()}) == len(find())
    assert all(each.cut if each.run else each.why for each in find())


@pytest.mark.nightly
@pytest.mark.parametrize("experiment", RUN, ids=lambda each: f"{each.paper}-{each.name}")
def test_fast_form_has_rows_and_claims(experiment):
    found = experiment.run(Options(fast=True))
    assert found.rows
    assert json.loads(json.dumps(found.parts))["metrics"]["verdict"] == found.verdict
    assert all(len(row) == len(found.head) for row in found.rows)
    assert 1 <= len(found.claims) <= 12
