import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from flwr_hetero import __version__
from flwr_hetero._flwr import app_tables
from flwr_hetero.cli import doctor, main
from flwr_hetero.cli.run import check_run_config

APP = Path(__file__).parents[2] / "apps" / "fleet"
"""The app with rules for its run-config: in those that people copy the strategies refuse."""


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
        check_run_config(APP, [given])


def test_every_key_has_a_rule():
    _, defaults = app_tables(APP)
    defaults.pop("dataset")  # the Hub may have anything
    wrong = {str: "'nonsense'", int: "-1", float: "-1.0", bool: "1"}
    for key, value in defaults.items():
        with pytest.raises(ValueError, match=f"^{key} must "):
            check_run_config(APP, [f"{key}={wrong[type(value)]}"])


RULES = """
class Rules:
    from_run_config = staticmethod(lambda config: None)

class Own(Rules):
    from_run_config = staticmethod(lambda config: 1 / (config["lr"] - 2))
"""


def test_app_has_known_keys_and_rules_of_its_own(tmp_path, capsys, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nserverapp = "plain_app_here:app"\n'
        "[tool.flwr.app.config]\nlr = 0.1\nnet.width = 3\n"
    )
    (tmp_path / "plain_app_here.py").write_text(RULES)
    assert check_run_config(tmp_path, ["lr=1.0 net.width=4"]) == {"lr": 1.0, "net.width": 4}
    with pytest.raises(ValueError, match=r"did you mean 'net\.width'"):
        check_run_config(tmp_path, ["net.with=4"])
    assert main(["doctor", str(tmp_path), "-c", "lr=1.0"]) == 0
    assert "ok    extra report" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert main(["doctor", str(tmp_path), "-c", "net.with=4"]) == 2
    output = capsys.readouterr()
    assert "note  simulation needs ray: in a checkout" in output.out
    assert f"'flwr_hetero-{__version__}-py3-none-any.whl[simulation]'" in output.out
    assert "did you mean 'net.width'" in output.err
    with pytest.raises(ZeroDivisionError):  # by the most derived of its rules
        check_run_config(tmp_path, ["lr=2"])


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
def test_doctor_says_what_a_client_lacks(lines, lacks, tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nserverapp = "server_here:app"\n'
        'clientapp = "client_here.client_app:app"\n'
    )
    (tmp_path / "server_here.py").write_text("")
    (tmp_path / "client_here").mkdir()
    # It is read, not imported.
    (tmp_path / "client_here" / "task.py").write_text(f"{lines}\nraise SystemExit")
    assert main(["doctor", str(tmp_path)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "ClientApp of" in line]
    assert len(said) == max(1, len(lacks))
    assert all(text in line for text, line in zip(lacks, said, strict=bool(lacks)))
    assert said[0].startswith("note" if lacks else "ok")
    (tmp_path / "client_here" / "task.py").write_text("def")
    assert main(["doctor", str(tmp_path)]) == 2
    assert "have readable modules" in capsys.readouterr().err


def test_doctor_finds_nothing_missing_in_the_apps():
    for path in APP.parent.glob("*/pyproject.toml"):
        components, _ = app_tables(path.parent)
        [line] = doctor.client_side(path.parent, components["clientapp"])
        assert line.startswith("ok")


def test_hint_names_the_extra_and_the_distribution():
    assert doctor.hint_for("torch").startswith("pip install torch, or in a checkout")
    assert doctor.hint_for("torch").endswith("'.[node]'")
    assert re.match(r"pip install scikit-learn, .*'\.\[task\]'$", doctor.hint_for("sklearn"))
    assert doctor.hint_for("unknown").endswith("'.[all]'")
