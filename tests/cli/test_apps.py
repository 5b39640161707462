"""The commands on apps: ``doctor`` and ``run``."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from flwr_hetero import __version__
from flwr_hetero.cli import apps, main

APPS = Path(__file__).parents[2] / "apps"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("num_tiers=3", "got 'num_tiers': did you mean 'num-tiers'?"),
        ("num-tiers=0", "num-tiers must be at least 1, got 0"),
        ("policy='oort'", "policy must be one of adaptive, "),
        ("policy=vanilla", "texts need quotes"),
        ("num-tiers = 3", "without blanks around ="),
        ("fleet=5", "fleet must be a text, got 5: write fleet='5'"),
        ("dataset='me/mnist'", None),
        ("seed=1 num-tiers=4", None),
    ],
)
def test_run_config_is_checked_by_the_apps_rules(given, words):
    with pytest.raises(ValueError, match=re.escape(words)) if words else nullcontext():
        apps.check_run_config(APPS / "fleet", [given])


RULES = """
class Rules:
    from_run_config = staticmethod(lambda config: None)

class Own(Rules):
    from_run_config = staticmethod(lambda config: 1 / (config["lr"] - 2))
"""


@pytest.fixture
def app(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nserverapp = "server_here:app"\n'
        'clientapp = "client_here.client_app:app"\n'
        "[tool.flwr.app.config]\nlr = 0.1\nnet.width = 3\n"
    )
    (tmp_path / "server_here.py").write_text(RULES)
    (tmp_path / "client_here").mkdir()
    return tmp_path


def test_app_has_keys_and_rules_of_its_own(app):
    given = ["lr=1.0 net.width=4"]
    assert apps.check_run_config(app, given) == {"lr": 1.0, "net.width": 4}
    with pytest.raises(ValueError, match=r"did you mean 'net\.width'"):
        apps.check_run_config(app, ["net.with=4"])
    with pytest.raises(ZeroDivisionError):  # by the most derived of its rules
        apps.check_run_config(app, ["lr=2"])


def test_doctor_says_what_is_not_installed(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    assert "ok    extra report" in capsys.readouterr().out
    monkeypatch.setattr(apps, "find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "note  simulation needs ray: in a checkout" in output
    assert f"'flwr_hetero-{__version__}-py3-none-any.whl[simulation]'" in output


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [
        ("app = ClientApp()", ["has no mod of this package", "does not take the steps"]),
        ("app = ClientApp(mods=[hetero])", ["does not take the steps"]),
        ("hetero.batches([], None)", ["has no mod of this package"]),
        ("mods = [m.hetero]\nfor x in hetero.batches([]): pass", []),
        ("app = ClientApp(mods=[hetero])\nhetero.num_steps(msg)", []),
        ("from flwr_hetero import keys", []),
    ],
)
def test_doctor_says_what_a_client_lacks(lines, lacks, app, capsys):
    # It is read, not imported.
    (app / "client_here" / "task.py").write_text(f"{lines}\nraise SystemExit")
    assert main(["doctor", str(app), "-c", "lr=1.0"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "ClientApp of" in line]
    assert len(said) == max(1, len(lacks))
    assert all(text in line for text, line in zip(lacks, said, strict=bool(lacks)))
    assert said[0].startswith("note" if lacks else "ok")


@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [("net.with=4", "", "did you mean 'net.width'"), ("lr=1", "def", "have readable modules")],
)
def test_doctor_fails_if_something_is_wrong(keys, code, words, app, capsys):
    (app / "client_here" / "task.py").write_text(code)
    assert main(["doctor", str(app), "-c", keys]) == 2
    assert words in capsys.readouterr().err


def test_doctor_finds_nothing_missing_in_the_apps():
    for path in APPS.glob("*/pyproject.toml"):
        [line] = apps.client_side(path.parent)
        assert line.startswith("ok")


def test_hint_names_the_extra_and_the_distribution():
    assert re.match(r"pip install scikit-learn, .*'\.\[task\]'$", apps.hint_for("sklearn"))
    assert re.match(r"pip install torch, .*'\.\[node\]'$", apps.hint_for("torch"))
    assert apps.hint_for("unknown").endswith("'.[all]'")


FLWR = """#!{python}
import json, sys
status = {status!r}
if sys.argv[1] == "run":
    print(sys.argv[2:])
    print("Successfully started run 42")
else:
    assert "42" in sys.argv
    print(json.dumps({{"runs": [{{"status": status}}]}}))
"""


@pytest.mark.parametrize(("status", "code"), [("finished:completed", 0), ("finished:failed", 2)])
def test_run_tells_by_its_status_how_it_ended(status, code, capsys, tmp_path, monkeypatch):
    program = tmp_path / "flwr"
    program.write_text(FLWR.format(python=sys.executable, status=status))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["run", str(APPS / "tifl"), "lab", "--nodes", "6", "-c", "seed=3"]) == code
    output = capsys.readouterr()
    assert "'lab', '--stream', '--run-config', 'seed=3', '--federation-config'" in output.out
    assert "num-supernodes=6 client-resources-num-cpus=1" in output.out
    assert output.err == ("" if code == 0 else "flwr-hetero: error: run 42 is finished:failed\n")
