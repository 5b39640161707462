"""The command ``reproduce``, its verdicts and the page of them, on experiments made here."""

import numpy as np
import pytest

from flwr_hetero.cli import main
from flwr_hetero_studies.core.experiment import Claim, Experiment, Finding, times
from flwr_hetero_studies.core.plan import NotHereError
from flwr_hetero_studies.papers import cases as catalogue


def outcome(*held):
    claims = [Claim(f"claim {i}", "2.0x", "1.9x", np.bool_(own)) for i, own in enumerate(held)]
    return Finding(["policy", "seconds"], [["fast", 1.0]], claims)


def toy(options):
    return outcome(True, options.fast)


@pytest.fixture
def experiments(monkeypatch):
    run = Experiment("tifl", "figure-1", "a toy", toy, cut="all of it", why="too small")
    listed = Experiment("tifl", "figure-2", "no toy", why="it is a drawing")
    monkeypatch.setattr(catalogue, "EXPERIMENTS", {"tifl": (run, listed)})
    return run, listed


def test_claims_decide():
    verdicts = [outcome(*held).verdict for held in ((1, 1), (1, 0), (0, 0))]
    assert verdicts == ["reproduced", "partly", "not reproduced"]


def test_a_factor_holds_from_two_thirds_of_the_papers():
    assert times("faster", 6, 4.0) == ("faster (at least 2/3 of it)", "6x", "4.0x", True)
    assert not times("faster", 6, 3.9).holds


def test_a_figure_stands_for_its_columns(monkeypatch):
    parts = tuple(Experiment("tifl", f"figure-{part}", "", toy) for part in ("3a", "3b", "13"))
    monkeypatch.setattr(catalogue, "EXPERIMENTS", {"tifl": parts})
    assert catalogue.find("tifl", "figure 3") == list(parts[:2])
    assert catalogue.find("tifl", "figure-3b") == [parts[1]]


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
    full = ("2.0x", "1.9x", "does not hold", "partly", "why: too small")
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
