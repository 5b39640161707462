"""A realistic run that never was: TiFL on 20 nodes of five speeds, with failures."""

import json

import numpy as np
import pytest

SHARES = np.array([4.0, 2.0, 1.0, 0.5, 0.1])


def fake_rounds(num_rounds: int = 60, num_nodes: int = 20) -> list[dict]:
    """Make up a history: adaptive tiers, a node that drops out, replies that are lost."""
    rng = np.random.default_rng(0)
    names = [f"node-{i}" for i in range(num_nodes)]
    tier = {name: i * 5 // num_nodes for i, name in enumerate(names)}
    mean_s = {name: 0.9 / SHARES[tier[name]] for name in names}
    profiled = {name: mean_s[name] * rng.lognormal(0, 0.05) for name in names}
    start_s = virtual_s = 4 * max(profiled.values())
    profiled[names[-1]] = None
    del tier[names[-1]]
    draw = {"tier": None, "tier_probs": [0.2] * 5, "credits": [24.0] * 5}
    rounds = [_round(0, virtual_s, 0.1)]
    rounds[0]["tifl"] = draw | {"tier_accuracy": [None] * 5, "tiers": tier, "latency": profiled}
    for number in range(1, num_rounds + 1):
        drawn = int(rng.choice(5))
        pool = [name for name in tier if tier[name] == drawn]
        selected = sorted(rng.choice(pool, size=min(4, len(pool)), replace=False).tolist())
        latency = {name: mean_s[name] * rng.lognormal(0, 0.12) for name in selected}
        virtual_s += max(latency.values())
        level = 0.93 - 0.83 * np.exp(-number / 14) + rng.normal(0, 0.008)
        record = _round(number, virtual_s, level) | {"selected": selected, "latency": latency}
        if number % 11 == 4:
            del latency[selected[-1]]
            reason = "no reply within 30 s" if number % 2 else "arrays are not finite: 'conv1'"
            record["failures"] = [{"node": selected[-1], "reason": reason}]
        record["tifl"] = draw | {
            **{"tier": drawn, "tier_accuracy": [level - 0.02 * t for t in range(5)]},
            **{"paper_estimate_s": number * 2.0, "exact_estimate_s": number * 2.2},
            "actual_s": virtual_s - start_s,
        }
        if number % 10 == 0:
            on_node = {name: level - 0.01 * t for name, t in tier.items()}
            record["fairness"] = {
                **{"metric": "eval-acc", "nodes": len(on_node), "by_node": on_node},
                **{"mean": level - 0.02, "worst_tenth": level - 0.04},
            }
        record["herding"] = {"herding_bound": 40 / np.sqrt(number) + rng.normal(0, 0.4)}
        steps = {name: int(rng.integers(8, 30)) for name in names}
        record["cd_grab"] = {"num_steps": steps, "estimator": "flat"}
        rounds.append(record)
    return rounds


def _round(number: int, virtual_s: float, level: float) -> dict:
    return {
        **{"round": number, "virtual_s": virtual_s, "wall_s": 0.8 + 0.21 * number},
        **{"bytes_up": 204_800 * (number > 0), "bytes_down": 205_600 * (number > 0)},
        "train": {"train-loss": 2.4 - 2.3 * level} if number else {},
        "evaluate": {"eval-acc": level - 0.01, "eval-loss": 2.3 - 2.2 * level} if number else {},
        "global": {"accuracy": level, "loss": 2.35 - 2.25 * level},
        **{"selected": [], "latency": {}, "failures": []},
    }


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run directory without going through RunDirectory."""

    def make(name="run", rounds=None, config=None):
        path = tmp_path / name
        path.mkdir(parents=True)
        lines = fake_rounds() if rounds is None else rounds
        text = "".join(json.dumps(record) + "\n" for record in lines)
        (path / "history.jsonl").write_text(text)
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        return path

    return make


@pytest.fixture(scope="session")
def rounds_of():
    """Return the generator of made-up rounds."""
    return fake_rounds
