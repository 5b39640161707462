"""Made-up histories: TiFL on nodes of five speeds with failures, and runs with a known rise."""

import json

import pytest

SPEEDS = [4.0, 2.0, 1.0, 0.5, 0.1]


def fake_rounds(num_rounds=60, num_nodes=20):
    """Make up a history: tiers take turns, one node drops out, some replies are lost."""
    names = [f"node-{i}" for i in range(num_nodes)]
    tier = {name: i * 5 // num_nodes for i, name in enumerate(names)}
    usual_s = {name: 0.9 / SPEEDS[tier[name]] for name in names}
    rounds = []
    virtual_s = 36.0
    for number in range(num_rounds + 1):
        level = 0.93 - 0.83 * 0.93**number
        trained = number * 7 % 5 if number else None
        selected = [name for name in names[:-1] if tier[name] == trained]
        virtual_s += max((usual_s[name] for name in selected), default=0.0)
        record = {
            "round": number,
            "virtual_s": virtual_s,
            "wall_s": 0.8 + 0.21 * number,
            "device_s": 2.0 * len(selected),
            "bytes_up": 2048 * number,
            "bytes_down": 2056,
            "train": {"train-loss": 2.4 - 2.3 * level} if number else {},
            "evaluate": {"eval-acc": level - 0.01} if number else {},
            "global": {"accuracy": level, "loss": 2.35 - 2.25 * level},
            "selected": selected,
            "failures": [],
            "latency": {name: usual_s[name] * (1 + 0.01 * number) for name in selected},
            "tifl": {
                "tier": trained,
                "tier_probs": [0.2] * 5,
                "credits": [24.0] * 5,
                "tier_accuracy": [level - 0.02 * t if number else None for t in range(5)],
            },
            "herding": {"herding_bound": 40 / (1 + number)},
            "cd_grab": {"num_steps": {name: 8 + tier[name] for name in names}, "estimator": "flat"},
        }
        if number == 0:
            record["tifl"]["tiers"] = {name: tier[name] for name in names[:-1]}
            record["tifl"]["latency"] = usual_s | {names[-1]: None}
        if number % 11 == 4:
            del record["latency"][selected[-1]]
            reason = "no reply within 30 s" if number % 2 else "arrays are not finite: 'conv1'"
            record["failures"] = [{"node": selected[-1], "reason": reason}]
        if number % 10 == 9:
            on_node = {name: level - 0.01 * tier[name] for name in names}
            record["fairness"] = {"metric": "eval-acc", "nodes": num_nodes, "by_node": on_node}
            record["fairness"] |= {"mean": level - 0.02, "worst_tenth": level - 0.04}
        rounds.append(record)
    return rounds


RISE = [0.1 * i for i in range(9)] + [0.9] * 12


def rise(round_s=1.0, values=RISE, metric="accuracy", **more):
    """Make rounds; the default values reach 0.89, one point below their final 0.9, in round 9."""
    return [
        {"round": i, "virtual_s": round_s and round_s * i, "global": {metric: value}, **more}
        for i, value in enumerate(values)
    ]


@pytest.fixture(scope="session")
def rising():
    rise.values = RISE
    return rise


@pytest.fixture
def make_run(tmp_path):
    """Write a run directory without going through RunDirectory."""

    def make(name="run", rounds=(), config=None):
        path = tmp_path / name
        path.mkdir(parents=True)
        text = "".join(json.dumps(record) + "\n" for record in rounds)
        (path / "history.jsonl").write_text(text)
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        return path

    return make


@pytest.fixture(scope="session")
def rounds_of():
    return fake_rounds
