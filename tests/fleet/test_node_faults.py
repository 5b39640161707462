"""One line for each fault of a node, and half-installed apps; no SuperNode runs here."""

import io
import zipfile
from email.utils import formatdate

import pytest
from flwr.supercore.fab import Fab

from flwr_hetero.fleet import node_faults
from flwr_hetero.fleet.node_faults import Failures, NodeFaults, explain, explain_refusal

HASH = "0123456789abcdef"
NOW_S = 1.8e9
# Texts of errors as Python, OpenSSL and Flower 1.41 wrote them, and a word of the remedy.
ERRORS = {
    "<class 'OSError'>:<'[Errno 28] No space left on device'>": "free some space",
    "[Errno 122] Disk quota exceeded: 'x'": "free some space",
    "[Errno 2] No usable temporary directory found in ['/tmp']": "free some space",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid "
    "(_ssl.c:1006)": "set the clock",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired "
    "(_ssl.c:1006)": "make a new one",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: IP address mismatch, certificate "
    "is not valid for '127.0.0.2'. (_ssl.c:1006)": "--superlink",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer "
    "certificate (_ssl.c:1006)": "copy the ca.crt",
    '{"code":2004,"detail":"Failed to activate SuperNode."}': "flwr supernode register",
}


@pytest.mark.parametrize("error", ERRORS)
def test_remedy_is_one_line(error):
    line = explain(error)
    assert ERRORS[error] in line
    assert "\n" not in line
    assert "{" not in line


def test_unknown_error_has_no_remedy():
    assert explain("[Errno 111] Connection refused") == ""


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [
        (-400, "400 s behind the SuperLink's"),
        (20, "20 s ahead of the SuperLink's"),
        (-200, "no longer knows this node"),
    ],
)
def test_refusal_is_explained_by_the_clock(ahead_s, said):
    assert said in explain_refusal(formatdate(NOW_S - ahead_s, usegmt=True), NOW_S)


def test_refusal_without_a_date_is_no_matter_of_clocks():
    assert "register its key again" in explain_refusal("", NOW_S)


@pytest.fixture
def app(tmp_path, monkeypatch):
    """An installed app, and its bundle."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    folder = tmp_path / "apps" / f"me.app.0.1.0.{HASH[:8]}"
    files = {"pyproject.toml": b"[project]", "app/client_app.py": b"app = 1\n", "app/empty.py": b""}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as bundle:
        for name, data in files.items():
            bundle.writestr(name, data)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        bundle.writestr(".info/CONTENT", "checksums")
    return folder, Fab(HASH, content.getvalue(), {})


def damage_nothing(folder):
    (folder / "app" / "__pycache__").mkdir()


def lose_file(folder):
    (folder / "app" / "empty.py").unlink()


def cut_file(folder):
    (folder / "app" / "client_app.py").write_bytes(b"app")


def lose_data(folder):
    (folder / "app" / "client_app.py").write_bytes(bytes(8))


@pytest.mark.parametrize("damage", [damage_nothing, lose_file, cut_file, lose_data])
def test_half_installed_app_is_removed(app, caplog, damage):
    folder, fab = app
    damage(folder)
    other = folder.with_name("me.app.0.1.0.ffffffff")
    other.mkdir()
    node_faults.remove_half_installed(fab, wait_s=0.0)
    assert other.exists()
    assert folder.exists() == (damage is damage_nothing)
    assert ("a half-installed app" in caplog.text) == (damage is not damage_nothing)


def test_app_that_is_being_installed_stays(app, monkeypatch):
    folder, fab = app
    data = (folder / "app" / "client_app.py").read_bytes()
    cut_file(folder)
    end = (folder / "app" / "client_app.py").write_bytes
    monkeypatch.setattr(node_faults.time, "sleep", lambda seconds: end(data))
    node_faults.remove_half_installed(fab)
    assert folder.exists()


def test_first_cause_is_repeated_while_a_node_fails(caplog):
    clock = iter([0, 1, 2, 59, 60, 61, 121, 130]).__next__
    failures = Failures(clock)
    causes = ["disk", "disk", "import", "import", "import", "load", "import"]
    for cause in causes:
        failures.failed(cause)
    first = "times in a row. The first cause: disk"
    assert [record.message for record in caplog.records] == [
        *("disk", "import", f"failed 5 {first}", "load", "import", f"failed 7 {first}"),
    ]
    caplog.clear()
    failures.succeeded()
    failures.failed("import")
    assert [record.message for record in caplog.records] == ["import"]


def test_replies_and_answers_are_explained(app, caplog):
    folder, fab = app
    lose_file(folder)
    faults = NodeFaults()
    faults.replied("<class 'OSError'>:<'[Errno 28] No space left on device'>", fab)
    assert not folder.exists()
    assert "free some space" in caplog.text
    caplog.clear()
    faults.replied("", fab)
    faults.answered(200, "", "")
    faults.answered(403, '{"code":2007,"detail":"the run has ended"}', "")
    assert not caplog.records
    assert not faults.is_refused
    faults.answered(0, "[Errno 111] Connection refused", "")
    faults.answered(401, '{"detail":"Invalid SuperNode authentication"}', "")
    assert [record.message for record in caplog.records] == [
        "a request to the SuperLink failed: [Errno 111] Connection refused",
        "the SuperLink no longer knows this node: register its key again",
    ]
    assert faults.is_refused


def test_reply_without_a_stored_app(app):
    NodeFaults().replied("The FAB could not be verified.", None)
    assert app[0].exists()


def test_folder_that_takes_no_file(tmp_path):
    assert node_faults.why_not_writable(tmp_path / "new" / "home") == ""
    (tmp_path / "file").touch()
    assert "cannot be used" in node_faults.why_not_writable(tmp_path / "file")
