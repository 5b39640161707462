"""The lines that README and docs/dropin.md show are those that the tests apply."""

import re
from pathlib import Path

import pytest
from dropin.patching import changes
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.server import client_support
from flwr_hetero.server.client_support import STEPS, MissingClientSupportError, tell_missing
from flwr_hetero.strategy import FedSlice

HERE = Path(__file__).parent
HALVES = HERE.parent / "e2e" / "examples" / "halves"
README, PAGE = (
    (HERE.parents[1] / name).read_text(encoding="utf-8") for name in ("README.md", "docs/dropin.md")
)
METHODS = ("slices", "tifl", "biased", "cd_grab", "mercury", "pgd")


def blocks_of(text, kind="diff"):
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


BLOCKS = blocks_of(PAGE)


@pytest.mark.parametrize(("number", "method"), [*enumerate(METHODS)])
def test_lines_of_a_method(number, method):
    files = changes((HERE / f"{method}.diff").read_text(encoding="utf-8"))
    server = files.pop("quickstart/server_app.py", [])
    node = [line for lines in files.values() for line in lines]
    (shown,) = changes(BLOCKS[number]).values()
    assert shown == server + node


def added(block):
    """Return the lines that a diff adds, without indents and comments."""
    lines = [line[1:] for line in block.splitlines() if line.startswith("+")]
    return [line.split("  #")[0].strip() for line in lines]


def test_lines_of_the_readme_are_those_of_the_page(tmp_path):
    """On the client the same lines; on the server the user's FedAvg inside, and a record."""
    (block,) = blocks_of(README)
    server, client = block.split(" # client_app.py\n")
    assert added(client) == added(BLOCKS[0].split(" # node\n")[1])
    names = {"FedAvg": FedAvg}
    exec("\n".join(added(server)).replace("/tmp", str(tmp_path)), names)
    assert isinstance(names["strategy"], names["Recorded"])
    assert isinstance(names["strategy"].inner, names["FedSlice"])
    assert names["strategy"].leaf.fraction_evaluate == 0.5


@pytest.mark.parametrize(("app", "turn"), [("lightning", 0), ("hugging_face", 1)])
def test_lines_in_trainers(app, turn):
    block = BLOCKS[len(METHODS)].split("\n # ")[turn]
    files = changes((HALVES / app / "biased.diff").read_text(encoding="utf-8"))
    (lines,) = files.values()
    (shown,) = changes(block).values()
    assert len(shown) >= 2
    assert not set(shown) - set(lines)


def test_error_without_the_nodes_half(monkeypatch):
    torch = client_support.STEP_LINES["torch"]
    monkeypatch.setattr(client_support, "STEP_LINES", {"numpy": torch})
    shown, _ = blocks_of(PAGE, "text")
    with pytest.raises(MissingClientSupportError) as error:
        tell_missing("BiasedLocalSGD", STEPS, "abc", 0)
    assert shown == f"MissingClientSupportError: {error.value}\n"


def test_error_of_a_fraction_inside():
    _, shown = blocks_of(PAGE, "text")
    with pytest.raises(ValueError) as error:  # noqa: PT011 (its text is what is compared)
        FedSlice(FedAvg(fraction_train=0.5))
    assert shown == f"ValueError: {error.value}\n"
