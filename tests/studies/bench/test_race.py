"""The race: what its nodes train, what its fleet counts, how it is tuned and read."""

from itertools import product
from math import inf

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import ModelAverage
from flwr_hetero_studies.core import bench, record
from flwr_hetero_studies.core.plan import Data, Options
from flwr_hetero_studies.race import (
    cases,
    cells,
    methods,
    network,
    outcomes,
    packed,
    tuning,
    watch,
    wide,
    wide_report,
)
from flwr_hetero_studies.tasks.data import Examples
from flwr_hetero_studies.tasks.training import train

# --- the nodes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mu", "lr"), [("sgd", 0.0, 0.2), ("sgd", 0.5, 0.2), ("momentum", 0.0, 0.1),
                           ("adam", 0.0, 0.01)]
)  # fmt: skip
def test_numpy_network_trains_as_torch_does(name, mu, lr):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    inputs = np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32)
    examples = network.Labelled(inputs, np.arange(40) % 3)
    net = [p.detach().numpy().copy() for p in model.parameters()]
    optimizer, sampler = network.Optimizer(name), UniformSampler(40, 8, seed=1)
    done = network.train_numpy(net, examples, sampler, 7, lr, mu, optimizer)
    tensors, sampler = Examples(*map(torch.from_numpy, examples)), UniformSampler(40, 8, seed=1)
    how = {"optimizer": "adam"} if name == "adam" else {"momentum": 0.9 * (name == "momentum")}
    theirs = train(model, tensors, sampler, num_steps=7, lr=lr, proximal=mu, **how)
    assert done[:5] == pytest.approx(theirs[:5], rel=1e-5)
    for array, parameter in zip(net, model.parameters(), strict=True):
        np.testing.assert_allclose(array, parameter.detach().numpy(), atol=1e-6)


# --- the fleet ------------------------------------------------------------------------------


def fleet(*speeds):
    app = ClientApp(mods=[emulated_device])

    @app.train()
    def answer(message, context):
        metrics = MetricRecord({"num-examples": 100, "examples-processed": 100})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return watch.MeteredGrid(app, [DeviceProfile(speed) for speed in speeds], seed=0)


def test_fleet_counts_work_that_nobody_waits_for():
    grid = fleet(2.0, 1.0, 0.1)
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    ask = [Message(content, node_id, "train") for node_id in grid.get_node_ids()]
    assert len(grid.send_and_receive(ask, timeout=1.0)) == 2
    assert grid.virtual_time_s == 1.0
    assert grid.device_s == pytest.approx(0.5 + 1.0 + 10.0)
    assert grid.examples == 300
    assert grid.bytes == 3 * 8 + 3 * 16, "a number each way, and another one back"


def test_average_is_that_of_model_average():
    wrapper, own = ModelAverage(window=3), watch.RunningAverage(3)
    for step in range(6):
        model = {"w": np.array([step**2], np.float32)}
        record = ArrayRecord({"w": Array(model["w"])})
        wrapper.add(record)
        own.add(model)
        expected = wrapper.averaged(record)["w"].numpy()
        np.testing.assert_allclose(own.model["w"], expected, rtol=1e-6)


# --- tuning ---------------------------------------------------------------------------------


def test_settings_are_tuned_one_after_the_other():
    method = methods.Entrant(None, (1, 2, 3), ("x", "y"), (0.1, 0.2))
    cost = lambda trial: abs(trial[0] - 0.2) + abs(trial[1] - 3) + (trial[2] != "y")  # noqa: E731
    found, batches = {}, []
    while todo := tuning.trials_of(method, found):
        batches.append(todo)
        found |= {trial: cost(trial) for trial in todo}
    assert batches == [
        [(0.1, 1, "x"), (0.2, 1, "x")], [(0.2, 2, "x"), (0.2, 3, "x")], [(0.2, 3, "y")]
    ]  # fmt: skip
    assert tuning.best_of(method, found) == (0.2, 3, "y")
    assert tuning.best_of(method, dict(list(found.items())[:4])) is None


def test_every_method_has_the_same_number_of_trials():
    for name, method in methods.METHODS.items():
        tried = len(method.rates) + len(method.first) + len(method.second) - 2
        # ours has FedAvg's rate
        assert tried == 7 or name == methods.OURS, name


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_can_be_made(name):
    method = methods.METHODS[name]
    for count, first, second in product((3, 5, 20), method.first, method.second):
        if method.runs_with(count, 20):
            assert method.build(count, 0, first, second) is not None


# --- the page -------------------------------------------------------------------------------


def line(name, seed, rise, *, step_s=1.0, most=0.9, looks=60, end=None, at_work=5):
    accuracy = [min(most, rise * n) for n in range(looks)]
    names = ("virtual_s", "bytes", "device_s", "examples")
    curve = {key: [step_s * n for n in range(looks)] for key in names}
    curve |= {"all": accuracy, "slow": [a / 2 for a in accuracy]}
    curve |= {f"{key}/8": curve[key] for key in ("all", "slow")}
    limits = {"limits": {"end": end, "virtual_s": step_s * (looks - 1)}} if end else {}
    case = {"experiment": "dirichlet, 5 at work", "name": name, "cell": "dirichlet",
            "at_work": at_work, "window": 8, **cases.SETTINGS}  # fmt: skip
    case["trial"] = [0.1, None, None]
    metrics = {"took_s": 1.0, **limits}
    return {"case": case, "seed": seed, "metrics": metrics, "curve": curve, "versions": {}}


YARD = {0: line("yardstick", 0, 0.01, end=0.5, step_s=10.0)}


def contest(**runs):
    return outcomes.Contest("dirichlet", 5, runs, YARD)


def test_target_is_reached_by_mean_of_four_looks():
    run = line("x", 0, 0.1)
    assert outcomes.reach(run, 0.35)["virtual_s"] == 5.0
    assert set(outcomes.reach(run, 0.95).values()) == {inf}
    assert outcomes.end(run, "slow") == pytest.approx(0.45)


def test_row_tells_who_does_not_get_there():
    found = contest(quick=[line("x", 0, 0.02)], never=[line("x", 0, 0.02, most=0.3)])
    # 0.49 after 510 and 26 s, 0.52 after 540 and 28
    assert found.row("quick")[1:4] == ["19.6x", "19.3x", "26.0"]
    assert found.row("never")[1] == "not reached"
    text = outcomes.faster([(1.0, inf), (inf, 5.0)], [4.0, 9.0])
    assert text == "> 4.0x; 1 of 2 not"
    assert outcomes.brief(["2.0x (1.0x to 3.0x); 1 of 5 not", "a (b)"])[0] == "2.0x; 1 of 5 not"


def test_duel_takes_the_quickest_rival():
    runs = {
        methods.OURS: [line(methods.OURS, 0, 0.02)],
        "a": [line("a", 0, 0.01)],
        "b": [line("b", 0, 0.02, step_s=1.5, most=0.8)],
    }
    found = contest(**runs).duel(-0.01)
    assert (found.rival, found.holds, found.reached) == ("b", True, True)
    assert found.ratio == pytest.approx(1.5)
    assert found.more == pytest.approx(0.1)
    never = {methods.OURS: [line("x", 0, 0.02, most=0.3)], "a": [line("a", 0, 0.01, most=0.3)]}
    assert not contest(**never).duel(-0.01).reached
    assert contest(a=runs["a"]).duel(-0.01) is None


def test_score_is_the_mean_time_to_three_levels():
    curve = {"virtual_s": [float(n) for n in range(100)]}
    curve |= {f"all/{w}": [0.01 * n for n in range(100)] for w in watch.WINDOWS}
    found = tuning.scores_of(curve, {"end": 0.5, "virtual_s": 200.0})
    assert found["8"] == pytest.approx(np.mean(np.log([49, 51, 53])), abs=1e-3)
    stuck = {key: [min(v, 0.48) for v in values] for key, values in curve.items()}
    stuck["virtual_s"] = curve["virtual_s"]
    again = tuning.scores_of(stuck, {"end": 0.5, "virtual_s": 200.0})
    assert again["8"] == pytest.approx(np.mean(np.log([49, 400, 400])), abs=1e-3)


# --- compression --------------------------------------------------------------------------------


def test_runs_in_bits_are_paired_by_seed_and_held_to_what_is_wanted():
    yard = YARD | {1: line("yardstick", 1, 0.01, end=0.5, step_s=10.0)}
    whole = {name: [line(name, seed, 0.02) for seed in (0, 1)] for name in (methods.OURS, "x")}
    bits = [line(methods.OURS, 1, 0.02, most=0.89)]
    contest = outcomes.Contest("dirichlet", 5, whole, yard)
    (pair,) = packed.pairs([contest], bits)
    assert [x["seed"] for x in pair.whole.runs[methods.OURS]] == [1]
    assert list(pair.bits.runs) == [methods.OURS], "what has run in one way only is left out"
    assert pair.against(methods.OURS).ratio == pytest.approx(1.0)
    # the bytes of a curve are its seconds: FedAvg needs ten times as many
    assert pair.bytes() == pytest.approx(26 / 510)
    assert pair.missed() == ["-1.0 points instead of -0.3 (dirichlet, 5 at work)"]
    slow = [line(methods.OURS, 1, 0.02, step_s=1.1)]
    (pair,) = packed.pairs([contest], slow)
    assert pair.missed() == ["0.91 times as fast instead of 0.97 (dirichlet, 5 at work)"]
    found = packed.section([contest], bits)
    assert "| dirichlet, 5 at work | FedSlice | 1.00 | 19.6x | 19.6x |" in found["packed"]


def test_runs_in_bits_have_compression_around_and_the_limits_of_whole_ones(monkeypatch):
    options = Options(cases.SETTINGS, "stdlib")
    lines = record.read(bench.CLAIMS["race"])
    trials = [x for x in cases.plan(options, lines) if "bits" in x.case]
    names = {(x.case["cell"], x.case["at_work"]) for x in trials}
    assert names == {key for key in cells.PACKED if key[0] == "texts"}
    asked = next(x for x in trials if x.case["name"] == methods.OURS)
    seen = {}

    def note(learning, profiles, strategy, **how):
        seen.update(how, strategy=strategy)
        raise StopIteration

    monkeypatch.setattr(cases, "race", note)
    monkeypatch.setattr(Data, "first", lambda self, train, test: "digits")
    with pytest.raises(StopIteration):
        cases.run(asked.case, asked.seed, Data("stdlib", ""), **asked.given)
    assert [type(s).__name__ for s in seen["strategy"].chain()][:2] == ["Compressed", "FedSlice"]
    assert (seen["strategy"].bits_up, seen["strategy"].bits_down) == (4, 4)
    assert seen["limits"].seconds == asked.given["limits"]["virtual_s"]


# --- other fleets and optimisers ----------------------------------------------------------------


def test_rates_are_tried_further_out_while_the_best_is_at_an_end():
    cost = lambda rate: abs(np.log2(rate / 0.8))  # noqa: E731
    found, tried = {}, []
    while todo := wide.next_rates((0.1, 0.05, 0.2), found):
        tried += todo
        found |= {rate: cost(rate) for rate in todo}
    assert tried == [0.1, 0.05, 0.2, 0.4], "one more than three, and no more"


def wide_line(name, seed, step_s, **more):
    each = line(name, seed, 0.02, step_s=step_s, **more)
    case = {"experiment": f"{wide.RUNS}Adam", "name": name, "cell": "Adam", "rate": 0.1}
    return each | {"case": case | {"window": 8}}


@pytest.mark.parametrize("cell", wide.WIDE)
def test_every_wide_cell_can_be_made(cell):
    each = wide.WIDE[cell]
    assert len(each.cell.fleet(0)) == 20
    for name in wide.names_in(cell):
        method = methods.METHODS.get(name, methods.METHODS[methods.EAGER])
        assert method.build(wide.AT_WORK, 0, *wide.SETTINGS[name], each.base) is not None


def test_ours_is_held_against_the_best_rival_early_and_late():
    yard = wide_line(tuning.YARDSTICK, 0, 10.0, end=0.5)
    yard["metrics"]["limits"]["late"] = 0.8
    times = dict.fromkeys(wide.WIDE["Adam"].rivals, 2.0)
    times |= {methods.OURS: 1.0, methods.BASE: 5.0}
    lines = [yard, *(wide_line(name, 0, step_s) for name, step_s in times.items())]
    (found,) = wide_report.contests_of(lines)
    assert found.duel.rival in wide.WIDE["Adam"].rivals
    assert found.duel.ratio == pytest.approx(2.0)
    assert found.missed() == []
    ours = next(line for line in lines if line["case"]["name"] == methods.OURS)
    reached = [contest.reach(ours, -0.01)["virtual_s"] for contest in found]
    assert reached == [26.0, 41.0]
    assert wide_report.contests_of([x for x in lines if x is not ours]) == []
