"""The committed record of the papers' figures: of every experiment there is."""

from flwr_hetero_studies.core.bench import CLAIMS
from flwr_hetero_studies.core.record import read
from flwr_hetero_studies.papers.cases import find


def test_every_experiment_that_can_be_run_was_run():
    known = {(x["case"]["experiment"], x["case"]["name"]) for x in read(CLAIMS["papers"])}
    every = {(each.paper, each.name): each for each in find()}
    assert known <= every.keys()
    missing = every.keys() - known
    assert len(every) >= 30
    assert len(missing) <= len(every) / 5
    assert all(every[key].why for key in missing), "a reason for each that was not run"
