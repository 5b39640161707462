import sys
from pathlib import Path

import pytest

from flwr_hetero.cli import main

APP = Path(__file__).parents[2] / "apps" / "tifl"
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
    assert main(["run", str(APP), "lab", "--nodes", "6", "-c", "seed=3"]) == code
    output = capsys.readouterr()
    assert "'lab', '--stream', '--run-config', 'seed=3', '--federation-config'" in output.out
    assert "num-supernodes=6 client-resources-num-cpus=1" in output.out
    assert output.err == ("" if code == 0 else "flwr-hetero: error: run 42 is finished:failed\n")
