"""Each app in a real `flwr run`: its run directory, a resume, the same seed again."""

import pytest
from app_run import failures
from recording import history

pytestmark = pytest.mark.app
FILES = ("config.json", "model.safetensors", "report.html", "checkpoint/state.npz")


def run(name, num_nodes, **settings):
    return pytest.param(name, num_nodes, settings, marks=pytest.mark.nightly, id=name)


@pytest.mark.parametrize(
    ("app", "num_nodes", "settings"),
    [
        pytest.param("fleet", 2, {"num_server_rounds": 2, "sampler": "mercury"}, id="fleet"),
        run("biased-local-sgd", 10, num_server_rounds=5),
        run("cd-grab", 4, num_server_rounds=6, batch_size=16),
        run("mercury", 4, num_server_rounds=8),
        run("pgd", 4, num_server_rounds=6),
        run("tifl", 20, num_server_rounds=8, interval=4),
        run("fedslice", 10, num_server_rounds=6),
    ],
)
def test_app_leaves_a_run_directory(flower, tmp_path, app, num_nodes, settings):
    out = tmp_path / "run"
    log = flower(app, num_nodes, output_dir=out, **settings)
    assert f"{out}/report.html" in log, log[-3000:]
    rounds = history(out)
    assert [record["round"] for record in rounds] == list(range(settings["num_server_rounds"] + 1))
    assert not failures(rounds)
    for name in FILES:
        assert (out / name).stat().st_size > 0, name
    start, first, last = rounds[0], rounds[1], rounds[-1]
    if app == "fleet":
        assert {"fedslice", "local_steps", "sampler"} <= set(last)
        assert last["fedslice"]["updates"] >= 1
        return
    assert last["global"]["accuracy"] > start["global"]["accuracy"]
    if app == "biased-local-sgd":
        assert list(last["biased_local_sgd"]["num_steps"].values()) == [32] * 8 + [1] * 2
        assert last["global"]["accuracy"] > 0.8
    if app == "cd-grab":
        assert last["cd_grab"]["pairs_together"] == 4 * (round(1437 / 4 / 16) // 2)
    if app == "tifl":
        assert len({record["tifl"]["tier"] for record in rounds}) >= 3
        assert f"{out}/compare.html" in log, log[-3000:]
        assert len(history(out / "baseline")) == 5  # ceil(0.4 * 8), and round 0
    if app == "mercury":
        assert last["sampler"]["coverage"] == 1.0
    if app == "pgd":
        assert last["sampler"]["coverage"] > first["sampler"]["coverage"]
    if app == "fedslice":
        assert last["fedslice"]["updates"] >= 1


LONG = {"num_server_rounds": 12, "fast_steps": 32}
CANCER = {"dataset": "breast-cancer", "model": "softmax", "learning_rate": 0.1}
CNN = {"dataset": "stdlib", "model": "flwr_hetero_studies.tasks.models.texts:textcnn"}
GPT = {"dataset": "stdlib", "task": "language-model", "model": "gpt", "optimizer": "adam"}
GPT |= {"learning_rate": 0.005, "fast_steps": 16, "selection": "all", "sampler": "mercury"}

SERIES = {"dataset": "series", "model": "auto", "learning_rate": 0.2, "partition": "iid"}
SERIES |= {"engine": "rounds", "steps": "epochs", "order": "cd-grab", "fleet": "uniform"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("app", "num_nodes", "least", "settings"),
    [
        ("fleet", 4, 0.2, LONG | CNN | {"learning_rate": 0.5}),
        ("fleet", 4, 0.85, LONG | CANCER),
        ("fleet", 5, 0.32, GPT),
        ("fleet", 5, 0.88, SERIES),
    ],
)
def test_other_inputs_and_tasks_than_images(flower, tmp_path, app, num_nodes, least, settings):
    usual = {"num_server_rounds": 6, "batch_size": 16, "output_dir": tmp_path}
    log = flower(app, num_nodes, **usual | settings)
    assert f"{tmp_path}/report.html" in log, log[-3000:]
    rounds = history(tmp_path)
    assert not failures(rounds)
    assert rounds[-1]["global"]["accuracy"] > least


ROUNDS = {"engine": "rounds", "steps": "epochs"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("app", "num_nodes", "same", "settings"),
    [
        ("biased-local-sgd", 5, ["biased_local_sgd"], {}),
        ("cd-grab", 3, ["global"], {}),
        ("fleet", 20, ["global", "latency"], ROUNDS | {"selection": "tifl", "sync_rounds": 1}),
    ],
)
def test_resume_equals_unbroken(flower, tmp_path, app, num_nodes, same, settings):
    flower(app, num_nodes, num_server_rounds=4, output_dir=tmp_path / "whole", **settings)
    for rounds, resume in ((2, False), (4, True)):
        how = {"num_server_rounds": rounds, "output_dir": tmp_path / "broken", "resume": resume}
        flower(app, num_nodes, **how, **settings)
    whole, broken = history(tmp_path / "whole"), history(tmp_path / "broken")
    assert [record["round"] for record in broken] == [0, 1, 2, 3, 4]
    assert [broken[-1][key] for key in same] == [whole[-1][key] for key in same]
