import json
import os
import urllib.error
import urllib.request

import pytest
from filelock import FileLock

from flwr_hetero.cli import main, watch


@pytest.fixture
def folder(make_run, rounds_of):
    return make_run("run", rounds_of(5))


def get(server, path="/", host=None):
    port = server.server_address[1]
    headers = {"Host": host} if host else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return answer.read().decode()


def test_states_of_a_run(tmp_path, folder):
    assert watch.state_of(tmp_path / "none") == watch.WAITING
    changed_s = (folder / "history.jsonl").stat().st_mtime
    with FileLock(folder / ".lock"):
        assert watch.state_of(folder, changed_s + 299) == watch.RUNNING
        assert watch.state_of(folder, changed_s + 301) == watch.STALLED
    assert (folder / ".lock").exists()
    assert watch.state_of(folder) == watch.KILLED
    (folder / "model.safetensors").touch()
    os.utime(folder / "model.safetensors", (changed_s + 1, changed_s + 1))
    assert watch.state_of(folder) == watch.ENDED


def test_page_follows_the_run_until_it_is_killed(folder, rounds_of):
    page = watch.LivePage(folder)
    with FileLock(folder / ".lock"):
        server = watch.serve(page)
        try:
            assert "data-newer" in get(server)
            before = json.loads(get(server, "/data.json"))
            with (folder / "history.jsonl").open("a") as file:
                file.write(json.dumps(rounds_of(6)[-1]) + "\n")
            assert page.look() == watch.RUNNING
            after = json.loads(get(server, "/data.json"))
            assert before["notes"] == after["notes"] == []
            assert before["facts"] != after["facts"]
            for path, host in (("/history.jsonl", None), ("/", "example.org:80")):
                with pytest.raises(urllib.error.HTTPError):
                    get(server, path, host)
        finally:
            server.shutdown()
            server.server_close()
    assert page.look() == watch.KILLED  # its process is gone
    assert json.loads(page.data)["notes"] == [watch.KILLED]


def test_command_ends_with_the_run(folder, monkeypatch, capsys):
    (folder / "model.safetensors").touch()
    monkeypatch.setattr(watch, "LAST_S", 0.0)
    assert main(["watch", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("http://127.0.0.1:")
    assert f"The run has ended: {folder}" in said
