import json
import os

from filelock import FileLock

from flwr_hetero.cli import main, runs
from flwr_hetero.report import page


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


def test_pages_of_a_long_run_take_a_tenth_of_a_processor(make_run, rounds_of, monkeypatch):
    """A page that takes two seconds is made again after twenty, whatever is written meanwhile."""
    folder = make_run("run", rounds_of(5))
    lock = FileLock(folder / ".lock", thread_local=False)
    made = []
    spent = []
    looks = []

    def write_page(data, path):
        made.append(len(looks))
        spent.append(2.0)

    def sleep(seconds):
        looks.append(seconds)
        with (folder / "history.jsonl").open("a") as file:
            file.write(json.dumps({"round": 5 + len(looks)}) + "\n")
        if len(looks) == 50:
            lock.release()

    monkeypatch.setattr(page, "write_page", write_page)
    monkeypatch.setattr(runs.time, "process_time", lambda: sum(spent))
    monkeypatch.setattr(runs.time, "sleep", sleep)
    lock.acquire()
    assert main(["watch", str(folder)]) == 0
    assert made == [0, 20, 40, 50]
    assert set(looks) == {runs.LOOK_S}


def test_command_ends_with_the_run(make_run, rounds_of, capsys):
    folder = make_run("run", rounds_of(5))
    changed_s = (folder / "history.jsonl").stat().st_mtime
    (folder / "model.safetensors").touch()
    os.utime(folder / "model.safetensors", (changed_s + 1, changed_s + 1))
    assert main(["watch", str(folder)]) == 0
    assert f"The run has ended: {folder}" in capsys.readouterr().out
    os.utime(folder / "model.safetensors", (changed_s - 1, changed_s - 1))  # of the run before
    assert not runs.has_ended(folder)
