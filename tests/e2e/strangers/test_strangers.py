"""Public apps with FedAvg, FedSlice, TiFL and a sampler: what each promises to leave as it was."""

import importlib.util
import json
import os
import re
from collections.abc import Callable

import pytest
from e2e.strangers.apps import APPS, KNOWN
from e2e.strangers.page import PAGE, RESULTS, made
from e2e.strangers.running import FOLDER, Outcome, changed, run, source_of

SPARED = 0.2
"""By so much of FedAvg's examples another number may be trained on."""
POINTS = 0.02
"""By so much an accuracy may lie below FedAvg's; or a loss above it, of that after round 1."""
TRUE_WARNINGS = (
    # Nodes are alike here.
    "TiFL: tiers of .*",
    # Flower hands messages to workers last in, first out: one node may wait behind the others.
    r"FedSlice clipped \d+ % of an update's weight.*",
    "Manually terminating ClientAppActor",
    "fraction_evaluate is set to 0.0.*",
)
CASES = [
    pytest.param(
        *(name, method),
        marks=[pytest.mark.xfail(reason=why, strict=False)]
        if (why := KNOWN.get((name, method)))
        else [],
        id=f"{name}-{method}",
    )
    for name, app in APPS.items()
    for method in app.methods
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Give a function that runs an app with a method, once; write down what came out."""
    known: dict[tuple[str, str], Outcome] = {}

    def of(name: str, method: str) -> Outcome:
        if (name, method) not in known:
            tmp = tmp_path_factory.mktemp(f"{name}-{method}")
            known[name, method] = run(APPS[name], method, tmp)
        return known[name, method]

    yield of
    if path := os.environ.get(f"{FOLDER}_RESULTS"):
        found = [
            {"app": name, "method": method, "lines": APPS[name].lines_for(method)} | one.facts()
            for (name, method), one in known.items()
        ]
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in found)


def open_app(name: str) -> None:
    """Skip where the app or a package of it is not there."""
    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} is not set: fill a folder by tests/e2e/strangers/fetch")
    if not source_of(APPS[name]).exists():
        pytest.skip(f"{source_of(APPS[name])} is not there")
    stood_in = {"wandb", "evaluate"}
    missing = [each for each in {*APPS[name].needs.split()} - stood_in if not is_there(each)]
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.app
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "method"), CASES)
def test_public_app(name: str, method: str, outcome: Callable[[str, str], Outcome]):
    open_app(name)
    usual = outcome(name, "FedAvg")
    mine = outcome(name, method)
    assert not usual.error, usual.error
    assert not mine.error, mine.error
    assert not mine.failures
    assert mine.reported == mine.trained_and_reported
    assert mine.trained == pytest.approx(usual.trained, rel=SPARED)
    assert usual.metrics <= mine.metrics
    true = "|".join([*TRUE_WARNINGS, *APPS[name].true_warnings])
    assert not [text for text in mine.warnings if not re.fullmatch(true, text)]
    assert mine.scores, "no score was reported"
    last = usual.scores[-1]
    first = usual.scores[0]
    if "loss" in APPS[name].score:
        assert mine.scores[-1] <= last + POINTS * first
    else:
        assert mine.scores[-1] >= last - POINTS


def test_diff_finds_lines_by_their_text():
    app = "a = 1\nif a:\n    b = 2\nb = 2\nc = 3\n"
    diff = " if a:\n b = 2\n+loader = {}\n-c = 3\n+c = 4\n"
    made = changed(app, diff, "FedSlice(strategy)")
    assert made == "a = 1\nif a:\n    b = 2\n    loader = FedSlice(strategy)\nb = 2\nc = 4\n"
    with pytest.raises(AssertionError, match="no line 'a = 1'"):
        changed(app, " b = 2\n a = 1\n", "")


@pytest.mark.parametrize("name", APPS)
def test_lines_to_change_are_few(name: str):
    app = APPS[name]
    assert {
        method: app.lines_for(method) for method in app.methods if app.lines_for(method) > 8
    } == {}
    assert {method for known, method in KNOWN if known == name} <= {*app.methods}


def test_page_is_of_the_results():
    assert made(json.loads(RESULTS.read_text(encoding="utf-8"))) in PAGE.read_text(encoding="utf-8")
