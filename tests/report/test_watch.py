import json
import os

from filelock import FileLock

from flwr_hetero.cli import main, runs


def test_page_follows_the_run_until_it_is_killed(make_run, rounds_of, monkeypatch, capsys):
    folder = make_run("run", rounds_of(5))
    pages = []
    lock = FileLock(folder / ".lock", thread_local=False)
    monkeypatch.setattr(runs.time, "process_time", lambda: 0.0)

    def sleep(seconds):
        pages.append((folder / "report.html").read_text())
        if len(pages) == 1:
            with (folder / "history.jsonl").open("a") as file:
                file.write(json.dumps(rounds_of(6)[-1]) + "\n")
        if len(pages) == 3:
            lock.release()

    monkeypatch.setattr(runs.time, "sleep", sleep)
    lock.acquire()
    assert main(["watch", str(folder)]) == 0
    first, second, same = pages
    assert all('http-equiv="refresh"' in page for page in pages)
    assert first != second == same
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    output = capsys.readouterr().out
    assert output.startswith(f"file://{folder}/report.html ")
    assert output.endswith(f"{runs.KILLED}\n")


def test_command_ends_with_the_run(make_run, rounds_of, capsys):
    folder = make_run("run", rounds_of(5))
    changed_s = (folder / "history.jsonl").stat().st_mtime
    (folder / "model.safetensors").touch()
    os.utime(folder / "model.safetensors", (changed_s + 1, changed_s + 1))
    assert main(["watch", str(folder)]) == 0
    assert f"The run has ended: {folder}" in capsys.readouterr().out
    os.utime(folder / "model.safetensors", (changed_s - 1, changed_s - 1))  # of the run before
    assert not runs.has_ended(folder)
