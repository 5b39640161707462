"""A realistic run that never was: TiFL on 20 nodes of five speeds, with failures."""

import json

import numpy as np
import pytest

SHARES = np.array([4.0, 2.0, 1.0, 0.5, 0.1])


def fake_rounds(
    num_rounds: int = 60, num_nodes: int = 20, seed: int = 0, *, tiered: bool = True
) -> list[dict]:
    """Make up a history: adaptive tiers if ``tiered``, else random nodes of the whole fleet."""
    rng = np.random.default_rng(seed)
    names = [f"node-{i}" for i in range(num_nodes)]
    tier = {name: i * 5 // num_nodes for i, name in enumerate(names)}
    mean_s = {name: 0.9 / SHARES[tier[name]] for name in names}
    profiled = {name: mean_s[name] * rng.lognormal(0, 0.05) for name in names}
    dropout = names[-1]
    credits, probs = np.full(5, 24.0), np.full(5, 0.2)
    start_s = virtual_s = 4 * max(profiled.values())
    rounds = [_round(0, virtual_s, 0.1)]
    if tiered:
        del tier[dropout]
        rounds[0]["tifl"] = {
            **{"tier": None, "tier_probs": probs.tolist(), "credits": credits.tolist()},
            **{"tier_accuracy": [None] * 5, "tiers": tier, "num_tiers": 5},
            **{"latency": profiled | {dropout: None}, "dropouts": [dropout]},
        }
    for number in range(1, num_rounds + 1):
        current = int(rng.choice(5))
        pool = [name for name in tier if not tiered or tier[name] == current]
        selected = sorted(rng.choice(pool, size=min(4, len(pool)), replace=False).tolist())
        latency = {name: mean_s[name] * rng.lognormal(0, 0.12) for name in selected}
        virtual_s += max(latency.values())
        level = 0.93 - 0.83 * np.exp(-number / 14) + rng.normal(0, 0.008)
        record = _round(number, virtual_s, level) | {"selected": selected, "latency": latency}
        record["weights"] = dict.fromkeys(selected, 1 / len(selected))
        if number % 11 == 4:
            lost = selected[-1]
            del latency[lost]
            reason = "no reply within 30 s" if number % 2 else "arrays are not finite: 'conv1'"
            record["failures"] = [{"node": lost, "reason": reason}]
        if tiered:
            credits[current] -= 1
            record["tifl"] = {
                **{"tier": current, "tier_probs": probs.tolist(), "credits": credits.tolist()},
                "tier_accuracy": [level - 0.02 * t for t in range(5)],
                "paper_estimate_s": number * float(probs @ (0.9 / SHARES)),
                "exact_estimate_s": 1.08 * number * float(probs @ (0.9 / SHARES)),
                "actual_s": virtual_s - start_s,
            }
        if number % 10 == 0:
            on_node = {name: level - 0.01 * t for name, t in tier.items()}
            record["fairness"] = {
                **{"metric": "eval-acc", "nodes": len(on_node), "by_node": on_node},
                **{"mean": level - 0.02, "worst_tenth": level - 0.04},
            }
        record["herding"] = {"herding_bound": 40 / np.sqrt(number) + rng.normal(0, 0.4)}
        record["cd_grab"] = {
            "effective_sample_size": 200 * (1 - np.exp(-number / 20)),
            "num_steps": {name: int(rng.integers(8, 30)) for name in names},
            "estimator": "flat",
        }
        rounds.append(record)
    return rounds


def _round(number: int, virtual_s: float, level: float) -> dict:
    evaluated = {"eval-acc": level - 0.01, "eval-loss": 2.3 - 2.2 * level}
    return {
        **{"round": number, "virtual_s": virtual_s, "wall_s": 0.8 + 0.21 * number},
        **{"bytes_up": 204_800 if number else 0, "bytes_down": 205_600 if number else 0},
        "train": {"train-loss": 2.4 - 2.3 * level} if number else {},
        "evaluate": evaluated if number else {},
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
