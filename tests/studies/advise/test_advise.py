"""Advice: the fleet of a former run, the judgement of runs, a ranking that repeats itself."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from math import exp, inf
from unittest.mock import Mock

import numpy as np
import pytest

from flwr_hetero.cli import main
from flwr_hetero.client.device import message_time_s
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies.advise import advice
from flwr_hetero_studies.advise.advice import Advice, advise
from flwr_hetero_studies.advise.candidates import BASES, candidates
from flwr_hetero_studies.advise.fleet import read_fleet
from flwr_hetero_studies.advise.simulate import Point, Simulation, judge, rank, row, target_of
from flwr_hetero_studies.advise.task import small_task
from flwr_hetero_studies.cli.advise import _print
from flwr_hetero_studies.race.watch import epoch_s

FLEET = (DeviceProfile(4.0), DeviceProfile(2.0), DeviceProfile(1.0), DeviceProfile(0.1))


# --- the fleet ---------------------------------------------------------------------------


def history(folder, records):
    text = "".join(json.dumps({"round": i, **r}) + "\n" for i, r in enumerate(records))
    (folder / "history.jsonl").write_text(text)
    return str(folder)


def test_devices_of_a_former_run(tmp_path):
    away = {"node": "c", "reason": "error 5: the emulated device is away"}
    records = [
        {"latency": {"a": 1.0, "b": 4.0}, "selected": ["a", "b", "c"], "failures": [away]},
        {"latency": {"b": 4.0, "c": 2.0}, "selected": ["b", "c"], "failures": []},
    ]
    found = read_fleet(history(tmp_path, records), 20, examples=100, model_mb=1.0)
    assert [device.name for device in found] == ["a", "c", "b"]  # the quickest first
    assert [epoch_s(device, 100, 1.0) for device in found] == pytest.approx([1.0, 2.0, 4.0])
    assert [device.availability for device in found] == [1.0, 0.5, 1.0]


REAL = {"a": (0.05, 0.5), "b": (0.2, 2.0), "c": (0.5, 5.0)}
"""Nodes' seconds of a step, and of reading data at each message."""
OUTSIDE = {"wait": 3.7, "start": 2.0, "receive": 0.25, "send": 0.25}


def real_run(known, count, steps_of):
    """Make lines of a run on real nodes; ``known``: whether they say times outside, of steps."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(count):
        steps = {node: steps_of(rng) for node in REAL}
        noise = dict(zip(REAL, np.exp(0.05 * rng.standard_normal(3)), strict=True))
        own = {node: noise[node] * steps[node] * step_s for node, (step_s, _) in REAL.items()}
        # what the first message of all warms up is no cost of each
        more_s = 30.0 if number == 0 else 0.0
        train = {node: more_s + own[node] + read_s for node, (_, read_s) in REAL.items()}
        line = {"latency": train, "simulated": False, "local_steps": {"num_steps": steps}}
        if "outside" in known:
            outside = {part: dict.fromkeys(REAL, seconds) for part, seconds in OUTSIDE.items()}
            line["seconds"] = {**outside, "train": train}
            line["seconds"] |= {"steps": own} if "steps" in known else {}
        else:
            line["latency"] = {node: sum(OUTSIDE.values()) + train[node] for node in REAL}
        records.append(line)
    return records


def several(rng):
    return int(rng.integers(5, 40))


@pytest.mark.parametrize(
    ("known", "steps_of"),
    [(["outside", "steps"], lambda rng: 10), (["outside"], several), ([], several)],
    ids=["nodes say it", "reading is told by steps", "all is told by steps"],
)
def test_what_a_message_costs_is_told_from_its_steps(tmp_path, known, steps_of):
    where = history(tmp_path, real_run(known, 40, steps_of))
    found = {each.name: each for each in read_fleet(where, 20, 160, 1.0, node="flower")}
    for node, (step_s, read_s) in REAL.items():
        assert epoch_s(found[node], 160, 1.0) == pytest.approx(10 * step_s, rel=0.1)
        assert message_time_s(found[node]) == pytest.approx(6.2 + read_s, rel=0.1)
        # An instruction that waits for 3.7 s on average came during a pause of twice that.
        assert found[node].poll_s == pytest.approx(2 * OUTSIDE["wait"] if known else 0.0)


def test_messages_of_flowers_nodes_cost_seconds_unless_the_fleet_says_what_they_cost(tmp_path):
    assert {message_time_s(each) for each in read_fleet("uniform", 3, 1, 1.0)} == {0.0}
    cold = read_fleet("uniform", 3, 1, 1.0, node="flower")
    assert [message_time_s(each) for each in cold] == pytest.approx([6.0] * 3)
    (tmp_path / "fleet.toml").write_text("[[device]]\npoll-s = 1.0")
    own = read_fleet(str(tmp_path / "fleet.toml"), 3, 1, 1.0, node="flower")
    assert [message_time_s(each) for each in own] == [0.5] * 3


def test_refusals(tmp_path, capsys):
    assert main(["advise", "paper-5", "--nodes", "2"]) == 2
    assert "nodes must be a whole number of at least 3" in capsys.readouterr().err
    assert main(["advise", history(tmp_path, [{"latency": {}}])]) == 2
    assert "must have the latency of nodes" in capsys.readouterr().err
    for wrong in ({"optimizer": "lion"}, {"base": "fedprox"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            advise("paper-5", **wrong)


def test_progress_is_shown_and_an_interrupt_is_one_line(monkeypatch, capsys):
    track = Mock(side_effect=lambda items, text, total: items)

    def rank(choices, seeds, make, execute):
        execute(make(choice, 0, None) for choice in choices[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr("flwr_hetero_studies.cli.advise.tracked", track)
    monkeypatch.setattr(advice, "rank", rank)
    monkeypatch.setattr(advice, "process_pool", ThreadPoolExecutor)
    monkeypatch.setattr(Simulation, "run", lambda simulation: [])
    assert main(["advise", "paper-5"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "flwr-hetero: interrupted"
    assert track.call_args.args[1:] == ("Emulating the fleet", 2)


# --- judging -----------------------------------------------------------------------------


def curve(accuracy, second=1.0):
    return [Point(second * i, a, 0.5, 10.0 * i, 2.0 * i) for i, a in enumerate(accuracy, 1)]


BASE = curve([0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8])


def test_judge_by_hand():
    assert target_of(BASE) == pytest.approx(0.79)
    same = judge(BASE, BASE)
    twice = judge(curve([0.8] * 4, 0.5), BASE)
    assert (same.speedup, same.bytes, same.device_s, same.reached) == (1.0, 1.0, 1.0, True)
    assert twice.speedup == pytest.approx(9 / 2)  # the fourth look, at 2 s
    assert twice.bytes == pytest.approx(4 / 9)
    never = judge(curve([0.69] * 18), BASE)
    assert never.speedup == pytest.approx(9 / 18 * exp(-1.0))
    assert (never.reached, never.bytes) == (False, inf)


def make(choice, seed, target):
    task = small_task(4, 48, seed=seed)
    return Simulation(choice, task, FLEET, 4, 2, 5, seed, target)


@pytest.mark.parametrize("choice", candidates(4, 2, limited=True), ids=lambda choice: choice.name)
def test_every_setting_can_be_tried(choice):
    assert Simulation(choice, small_task(4, 48), FLEET, 4, 2, 2, 0).run()


def test_same_seed_same_ranking():
    choices = candidates(4, 2)
    chosen = [c for c in choices if c.name in ("FedAvg", "deadline", "FedBuff, epochs")]
    asked = []

    def execute(work):
        work = list(work)
        asked.append([(each.candidate.name, each.seed) for each in work])
        return [each.run() for each in work]

    first = rank(chosen, [100, 101], make, execute)
    assert [len(group) for group in asked] == [2, 2, 1]  # the better half runs again
    assert rank(chosen, [100, 101], make, execute) == first
    found = {row.candidate.name for row in first}
    assert found == {choice.name for choice in chosen}
    assert [row.speedup for row in first] == sorted((r.speedup for r in first), reverse=True)
    rows = {row.candidate.name: row for row in first}
    assert Advice(list(FLEET), 2, 16, {"mixed": rows}).best.name in found


# --- what is run -------------------------------------------------------------------------


NAMES = ("fast_steps", "budget", "concurrency", "buffer_size", "num_tiers", "policy", "take",
         "profiling", "window", "clients_per_round", "bits_up", "bits_down")  # fmt: skip


@pytest.mark.parametrize("base", BASES)
def test_printed_lines_make_the_strategy_that_was_run(base):
    for choice in candidates(20, 3, limited=True, base=base):
        lines = {}
        exec(choice.python(12), lines)
        both = zip(choice.strategy(12, 0).chain(), lines["strategy"].chain(), strict=True)
        for mine, other in both:
            assert type(mine) is type(other)
            for name in NAMES:
                assert vars(mine).get(name) == vars(other).get(name), (choice.name, name)


def test_command_ends_with_lines_for_the_users_app(capsys):
    choice = next(choice for choice in candidates(4, 2) if choice.name.endswith("few in flight"))
    points = make(choice, 100, None).run()
    own = row(choice, [judge(points, points)])

    def show(own):
        rows = {"mixed": {choice.name: own}}
        _print(Advice(list(FLEET), 2, 16, rows, base=choice.name))

    show(own)
    said = capsys.readouterr().out
    assert "strategy = FedSlice(concurrency=2)\n" in said
    assert "app = ClientApp(mods=[hetero])\n" in said
    assert "1.0x " in said
    assert "1.0 to 1.0" not in said
    assert "A setting with one run is ranked by that run alone" in said
    show(own._replace(seeds=2, reached=2))
    said = capsys.readouterr().out
    assert "1.0 to 1.0" in said
    assert "one run" not in said
    show(own._replace(seeds=3, reached=1))
    assert re.search(r"never in 2 +3", capsys.readouterr().out)
