"""A realistic run that never was: TiFL on 20 nodes of five speeds, with failures."""

import json

import numpy as np
import pytest

SHARES = (4.0, 2.0, 1.0, 0.5, 0.1)


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
    credits, probs = np.array([24.0, 18.0, 12.0, 9.0, 3.0]), np.full(5, 0.2)
    virtual_s, wall_s, estimate_s, actual_s = 4 * max(profiled.values()), 0.8, 0.0, 0.0
    rounds = [_round(0, virtual_s, wall_s, 0.1, rng)]
    if tiered:
        del tier[dropout]
        rounds[0]["tifl"] = {
            "tier": None,
            "tier_probs": probs.tolist(),
            "credits": credits.tolist(),
            "tier_accuracy": [None] * 5,
            "tiers": tier,
            "latency": profiled | {dropout: None},
            "dropouts": [dropout],
            "boundaries": [0.33, 0.66, 1.4, 5.0],
            "num_tiers": 5,
        }
    accuracy = [None] * 5
    for number in range(1, num_rounds + 1):
        credits = credits if credits.any() else np.array([24.0, 18.0, 12.0, 9.0, 3.0])
        current = int(rng.choice(5, p=probs * (credits > 0) / probs[credits > 0].sum()))
        pool = [name for name in tier if not tiered or tier[name] == current]
        selected = sorted(rng.choice(pool, size=min(4, len(pool)), replace=False).tolist())
        latency = {name: mean_s[name] * rng.lognormal(0, 0.12) for name in selected}
        lost = selected[-1] if rng.random() < 0.08 else None
        credits[current] = max(credits[current] - 1, 0)
        round_s = max(latency.values())
        virtual_s, wall_s, actual_s = virtual_s + round_s, wall_s + 0.21, actual_s + round_s
        estimate_s += float(probs @ (0.9 / np.array(SHARES)))
        level = 0.93 - 0.83 * np.exp(-number / 14) + rng.normal(0, 0.008)
        record = _round(number, virtual_s, wall_s, level, rng)
        record |= {"selected": selected, "latency": {n: latency[n] for n in selected if n != lost}}
        if lost:
            reason = "no reply within 30 s" if number % 2 else "arrays are not finite: 'conv1'"
            record["failures"] = [{"node": lost, "reason": reason}]
        if tiered:
            if number % 10 == 0:
                accuracy = [round(level - 0.02 * t + rng.normal(0, 0.01), 4) for t in range(5)]
                probs = np.argsort(np.argsort(-np.array(accuracy))) + 1.0
                probs /= probs.sum()
            record["tifl"] = {
                "tier": current,
                "tier_probs": probs.tolist(),
                "credits": credits.tolist(),
                "tier_accuracy": accuracy,
                "paper_estimate_s": estimate_s,
                "exact_estimate_s": 1.08 * estimate_s,
                "actual_s": actual_s,
            }
        record["herding"] = {"herding-bound": 40 / np.sqrt(number) + rng.normal(0, 0.4)}
        record["cd-grab"] = {
            "effective_sample_size": 200 * (1 - np.exp(-number / 20)),
            "num_steps": {name: int(rng.integers(8, 30)) for name in names},
            "estimator": "flat",
        }
        rounds.append(record)
    return rounds


def _round(number: int, virtual_s: float, wall_s: float, level: float, rng) -> dict:
    trained = {"train-loss": 2.4 - 2.3 * level + rng.normal(0, 0.03)}
    evaluated = {"eval-acc": level - 0.01 + rng.normal(0, 0.01), "eval-loss": 2.3 - 2.2 * level}
    return {
        "round": number,
        "virtual_s": virtual_s,
        "wall_s": wall_s,
        "bytes_up": 4 * 51_200 if number else 0,
        "bytes_down": 4 * 51_400 if number else 0,
        "train": trained if number else {},
        "evaluate": evaluated if number else {},
        "global": {"accuracy": level, "loss": 2.35 - 2.25 * level},
        "selected": [],
        "latency": {},
        "failures": [],
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
