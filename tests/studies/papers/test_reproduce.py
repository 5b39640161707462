"""The command ``reproduce``, its verdicts and the page of them, on experiments made here."""

import numpy as np
import pytest

from flwr_hetero.cli import main
from flwr_hetero_studies.core.criteria import (
    CONSTRUCTION,
    NOT,
    REPRODUCED,
    SIZE,
    UNTESTED,
    Claim,
    about,
    higher,
    interval,
    times,
)
from flwr_hetero_studies.core.experiment import Experiment, Finding, together
from flwr_hetero_studies.core.plan import NotHereError
from flwr_hetero_studies.papers import cases as catalogue


def outcome(*held):
    verdicts = (REPRODUCED if each else NOT for each in held)
    claims = [Claim(f"claim {i}", "2.0x", "1.9x", own) for i, own in enumerate(verdicts)]
    return Finding(["policy", "seconds"], [["fast", 1.0]], claims)


def toy(options):
    return outcome(True, options.fast)


@pytest.fixture
def experiments(monkeypatch):
    run = Experiment("tifl", "figure-1", "a toy", toy, cut="all of it", why="too small")
    listed = Experiment("tifl", "figure-2", "no toy", why="it is a drawing")
    monkeypatch.setattr(catalogue, "EXPERIMENTS", {"tifl": (run, listed)})
    return run, listed


VERDICTS = [
    ((REPRODUCED, REPRODUCED), REPRODUCED), ((REPRODUCED, NOT), "partly"), ((NOT, NOT), NOT),
    ((REPRODUCED, SIZE), SIZE), ((SIZE, NOT), "partly"), ((CONSTRUCTION, NOT), NOT),
    ((CONSTRUCTION, REPRODUCED), REPRODUCED), ((UNTESTED, CONSTRUCTION), UNTESTED),
    ((CONSTRUCTION,), CONSTRUCTION),
]  # fmt: skip


@pytest.mark.parametrize(("claims", "verdict"), VERDICTS)
def test_claims_that_could_fail_decide(claims, verdict):
    assert together(claims) == verdict


NOISE = np.random.default_rng(0).normal(size=10)


def test_an_interval_is_students():
    mean, _, high = interval([1.0, 2.0, 3.0])
    assert (mean, high - mean) == (2.0, pytest.approx(4.303 / 3**0.5, rel=1e-3))
    assert interval([1.0])[1:] == interval([1.0, np.inf])[1:] == (-np.inf, np.inf)


def test_a_gain_must_exclude_zero_and_has_a_size():
    gain = 1 + 0.5 * NOISE
    for shift, size, verdict in (
        (0, None, REPRODUCED), (0, 1.4, REPRODUCED), (0, 0.5, SIZE), (0, 3, SIZE),
        (-1, None, NOT), (-3, None, NOT),
    ):  # fmt: skip
        assert higher("", "", gain + shift, size=size).verdict == verdict
    assert higher("", "", gain, NOISE).verdict == NOT, "each must be above zero"
    assert higher("", "", [1.0]).verdict == NOT, "one seed has no interval"


def test_a_factor_is_two_sided():
    ratios = np.exp(1.5 + 0.2 * NOISE)  # 4.5
    for published, verdict in ((6, REPRODUCED), (3.2, REPRODUCED), (11, SIZE), (1.5, SIZE)):
        assert times("", published, ratios).verdict == verdict
    assert times("", 1.2, ratios / 4.5).verdict == NOT
    assert times("", 6, [*ratios, 0.0]).found == "never in some run"
    assert times("", 2, ratios, most=5).verdict == REPRODUCED
    assert times("", 2, ratios * 3, most=5).verdict == SIZE
    assert about("", 0.5, 0.45 + 0.01 * NOISE).verdict == REPRODUCED
    assert about("", 0.5, 0.2 + 0.01 * NOISE).verdict == SIZE


def test_what_this_machine_cannot_run_is_said(monkeypatch, capsys):
    def needs_more(options):
        raise NotHereError("needs a GPU")

    lonely = (Experiment("tifl", "figure-1", "", needs_more),)
    monkeypatch.setattr(catalogue, "EXPERIMENTS", {"tifl": lonely})
    assert main(["reproduce"]) == 0
    assert "not run: needs a GPU" in capsys.readouterr().out


def test_list_has_a_line_for_each_that_begins_with_the_paper(experiments, capsys):
    assert main(["reproduce", "--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["tifl", "figure-1", "a", "toy"]
    assert second.endswith("no toy (not run)")


def test_a_run_prints_claims_and_why_one_fails_a_fast_one_what_it_cuts(experiments, capsys):
    full = ("2.0x", "1.9x", "not reproduced", "partly", "why: too small")
    fast = ("--fast: all of it", "reproduced")
    for form, there, gone in (([], full, "all of it"), (["--fast"], fast, "too small")):
        assert main(["reproduce", "TiFL", "figure 1", *form]) == 0
        printed = capsys.readouterr().out
        assert all(text in printed for text in there)
        assert gone not in printed


WRONG = [(["pdg"], "paper must be one of tifl"), (["tifl", "--seed", "-1"], "seed must be"),
         (["tifl", "figure-9"], "figure must be one of figure-1, figure-2")]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_wrong_arguments_are_one_line(experiments, capsys, arguments, text):
    assert main(["reproduce", *arguments]) == 2
    assert text in capsys.readouterr().err
