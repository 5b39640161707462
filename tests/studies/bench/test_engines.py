"""What simulations cost: counts of replies, and who spends the time of one."""

import pytest

from flwr_hetero._flwr import only_errors
from flwr_hetero.fleet import Fault, LocalGrid, named_fleet
from flwr_hetero_studies.cost import engines, report

CASE = {"experiment": "ray", "engine": engines.LOCAL, "job": "empty", "nodes": 4, "rounds": 2}
MS = dict.fromkeys(("work_ms", "server_ms", "rest_ms", "workers_ms"), 2.0)


def measured(job, faults=()):
    grid = LocalGrid(engines.nodes_app(job), named_fleet("uniform", 4), faults=faults)
    with only_errors():
        return engines.measure(grid, CASE | {"job": job})


@pytest.mark.parametrize("job", engines.JOBS)
def test_all_replies_are_counted_with_the_apps_own_time(job):
    found = measured(job)
    assert found["replies"] > 4
    assert (found["nodes"], found["lost"]) == (4, 0)
    assert found["work_ms"] > 0
    assert found["queue_ms"] == found["workers_ms"] == 0.0


def test_errors_are_lost():
    found = measured("empty", [Fault(1, "dies", 2)])
    assert found["lost"] >= 1


def test_engines_are_compared_job_by_job():
    metrics = {"replies": 3000, "lost": 0, "mb": 700.0, "more_mb": 1.0} | MS
    lines = [
        {"case": CASE | {"engine": engine}, "metrics": metrics | own}
        for engine, own in ((engines.RAY, {"per_s": 50.0, "queue_ms": 8.0}),
                            (engines.LOCAL, {"per_s": 150.0, "queue_ms": 0.0}))
    ]  # fmt: skip
    text = report.engines(lines)
    assert "3.0 times Ray's replies a second for 0.50 of its CPU time" in text
    assert "Ray's queue 50% of its own" in text
    assert report.engines(lines[:1]).count("times") == 0
