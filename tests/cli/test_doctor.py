import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from flwr_hetero._flwr import app_tables
from flwr_hetero.cli import doctor, main
from flwr_hetero.cli.run import check_run_config
from flwr_hetero.fleet import certificates

APPS = Path(__file__).parents[2] / "apps"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("num_tiers=3", "got 'num_tiers': did you mean 'num-tiers'?"),
        ("num-tiers=0", "num-tiers must be a whole number of at least 1, got 0"),
        ("policy='oort'", "policy must be one of adaptive, "),
        ("policy=vanilla", "texts need quotes"),
        ("num-tiers = 3", "without blanks around ="),
        ("credits=5", "credits must be a text, got 5: write credits='5'"),
        ("dataset='me/mnist'", None),
        ("seed=1 num-tiers=4", None),
    ],
)
def test_run_config_is_checked_by_the_apps_rules(given, words, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "installation", list)
    status = main(["doctor", str(APPS / "tifl"), "--run-config", given])
    said = capsys.readouterr().out.splitlines()[-1]
    assert status == (words is not None)
    assert said.startswith("FAIL " if words else "ok  ")
    assert (words or "run-config of") in said


@pytest.mark.parametrize("app", sorted(path.name for path in APPS.iterdir()))
def test_every_key_of_every_app_has_a_rule(app):
    _, defaults = app_tables(APPS / app)
    defaults.pop("dataset")  # the Hub may have anything
    wrong = {str: "'nonsense'", int: "-1", float: "-1.0", bool: "1"}
    for key, value in defaults.items():
        with pytest.raises(ValueError, match=f"^{key} must "):
            check_run_config(APPS / app, [f"{key}={wrong[type(value)]}"])


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
    assert main(["doctor", str(tmp_path), "-c", "lr=1.0 net.width=4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok    flwr-hetero 0.")
    assert "extra report" in said
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert main(["doctor", str(tmp_path), "-c", "net.with=4"]) == 1
    said = capsys.readouterr().out
    assert "did you mean 'net.width'" in said
    assert "note  for simulation ray are missing: in a checkout" in said
    with pytest.raises(ZeroDivisionError):  # by the most derived of its rules
        main(["doctor", str(tmp_path), "-c", "lr=2"])


@pytest.fixture
def listener(tmp_path, monkeypatch):
    """Where Flower's configuration says that the SuperLink is, by an authority of its own."""
    certificates.make_authority(tmp_path / "trusted")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        lines = ["[superlink.lab]", f'address = "{address}"']
        lines.append(f'root-certificates = "{tmp_path}/trusted/ca.crt"')
        (tmp_path / "config.toml").write_text("\n".join(lines))
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        yield listener, address


@pytest.mark.parametrize("trusted", [True, False])
def test_superlink_must_have_a_trusted_certificate(listener, trusted, tmp_path):
    door, address = listener
    keys = tmp_path / ("trusted" if trusted else "other")
    if not trusted:
        certificates.make_authority(keys)
    certificates.make_server_certificate(keys, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")

    def serve():
        plain, _ = door.accept()
        with suppress(OSError), plain:
            context.wrap_socket(plain, server_side=True).close()

    server = threading.Thread(target=serve)
    server.start()
    [(state, text)] = doctor.superlink("lab")
    server.join()
    assert state == ("ok" if trusted else "FAIL")
    assert text.startswith(f"superlink lab: {address}")
    assert text.endswith("flwr supernode list lab" if trusted else "see root-certificates")


def test_superlink_that_is_not_there(listener, capsys):
    door, address = listener
    door.close()
    assert main(["doctor", "--superlink", "lab"]) == 1
    assert f"FAIL  superlink lab: {address}:" in capsys.readouterr().out
