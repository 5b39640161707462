"""The report on CD-GraB from the json lines beside it: tables and plots, never runs anything.

Usage, from the top folder: ``python -m benchmarks.cd_grab.report``; writes ``report.md``,
``training.png`` and the plots of the synthetic experiment.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.cd_grab import synthetic_report
from flwr_hetero.report.style import LIGHT, run_look

HERE = Path(__file__).parent
LAST = 5
NAMES = {
    "d-rr": "D-RR",
    "shuffle-once": "shuffle once",
    "id-grab-mean": "ID-GraB(Bal)",
    "id-grab": "ID-GraB(PairBal)",
}
Line = dict[str, Any]


def read(name: str) -> list[Line]:
    path = HERE / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def name_of(line: Line) -> str:
    if line["method"] != "cd-grab":
        return NAMES[line["method"]]
    return f"CD-GraB, k = {line['sketch_size']}" if line["sketch_size"] else "CD-GraB, exact"


def grouped(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        found[tuple(line[key] for key in keys)].append(line)
    return found


def spread(values: list[float], digits: int = 3) -> str:
    text = f"{np.mean(values):.{digits}g}"
    return text + (f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else "")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# --- claims -----------------------------------------------------------------------------------


def excess_ratio(method: str, size: int) -> str:
    """Divide CD-GraB's excess by D-RR's in the main convex case."""
    least = {(x["num_examples"], x["l2"], x["seed"]): x["value"] for x in read("optimum")}
    found: dict[str, dict[int, float]] = {"ours": {}, "d-rr": {}}
    for x in read("training"):
        if x["case"] == "softmax, 8 nodes":
            excess = final(x, "loss") - least[x["num_examples"], x["l2"], x["seed"]]
            if (x["method"], x["sketch_size"]) == (method, size):
                found["ours"][x["seed"]] = excess
            elif x["method"] == "d-rr":
                found["d-rr"][x["seed"]] = excess
    return ratio(found["ours"], found["d-rr"])


def fleet_ratios() -> dict[str, float]:
    """Divide the bounds of ours by ID-GraB(PairBal)'s, by case, over the seeds that are there."""
    result = {}
    for (case,), runs in grouped(read("fleet"), "case").items():
        bound = {(x["method"], x["seed"]): x["bound"] for x in runs}
        seeds = [s for method, s in bound if method == "CD-GraB, ours"]
        if seeds:
            sums = [sum(bound[m, s] for s in seeds) for m in ("CD-GraB, ours", "ID-GraB(PairBal)")]
            result[case] = sums[0] / sums[1]
    return result


def summary() -> str:
    balance = [x for x in read("server_speed") if x["what"] == "pair_balance"]
    limits = ", ".join(
        f"{x['of-reading-two-gradients']:.2f} / {x['of-reading-the-difference']:.2f} "
        f"(d = {x['dim']:,})"
        for x in balance
    )
    _, runs = synthetic_report.read(HERE / "synthetic_1000000.jsonl")
    ours = [float(b[:, -3:].mean()) for (_, method), b in runs.items() if method == "CD-GraB"]
    ratios = fleet_ratios()
    worst = max(ratios, key=lambda case: ratios[case])
    rows = [
        [
            "Fig. 10: the bound does not grow with the number of nodes",
            "2.3 to 2.6",
            f"{min(ours):.2f} to {max(ours):.2f}, {len(ours)} numbers of nodes",
        ],
        [
            "excess loss at the larger step, exact / D-RR",
            "at most 0.5",
            excess_ratio("cd-grab", 0),
        ],
        ["the same, sketches of 1,024", "at most 0.6", excess_ratio("cd-grab", 1024)],
        [
            "share of the limit by reading two gradients / the difference",
            "at least 0.5",
            limits,
        ],
        [
            "never worse than ID-GraB(PairBal): worst ratio of bounds",
            "at most 1",
            f"{ratios[worst]:.2f} ({worst})",
        ],
    ]
    return table(["what", "wanted", "measured"], rows)


# --- the synthetic experiment -----------------------------------------------------------------


def synthetic() -> str:
    text = [
        "## Fixed vectors (the paper's Fig. 10)\n",
        "Herding bound of vectors of 16 numbers, mean of the last 3 of 15 rounds, ± standard "
        "deviation over seeds. In [ ]: an independent implementation that is not part of this "
        "package, other seeds. In { }: read off the paper's figure.\n",
    ]
    for num_vectors in (1_000_000, 65_536):
        path = HERE / f"synthetic_{num_vectors}.jsonl"
        if not path.exists():
            continue
        number, runs = synthetic_report.read(path)
        synthetic_report.plot(number, runs, path.with_suffix(".png"))
        seeds = len(next(iter(runs.values())))
        took = sum(x["seconds"] for x in read(path.stem) if x["method"] == "CD-GraB")
        text += [
            f"### {number:,} vectors, {seeds} seed(s)\n",
            f"`python -m benchmarks.cd_grab.synthetic --num-vectors {number}"
            + (" --nodes 4 16 64" if number == 65_536 else " --seeds 0")
            + f"`; all runs of CD-GraB together took {took:.0f} s on a loaded machine.\n",
            synthetic_report.table(number, runs),
            f"![Herding bound]({path.stem}.png)\n",
        ]
    return "\n".join(text)


# --- the order server -------------------------------------------------------------------------


def speed() -> str:
    lines = read("server_speed")
    balance = [x for x in lines if x["what"] == "pair_balance"]
    rounds = [x for x in lines if x["what"] != "pair_balance"]
    if not lines:
        return ""
    rows = [
        [
            f"{x['dim']:,}",
            f"{x['ours-pairs-per-s']:,}",
            f"{x['numpy-pairs-per-s']:,}",
            f"{x['torch-pairs-per-s']:,}",
            f"{x['read-gb-per-s']}",
            f"{x['of-reading-two-gradients']:.2f}",
            f"{x['of-reading-the-difference']:.2f}",
            f"{x['extra-vectors']}",
        ]
        for x in balance
    ]
    head = ["d", "pairs/s, ours", "NumPy loop", "torch loop", "read GB/s"]
    head += ["of reading two gradients", "of reading the difference", "extra memory, vectors"]
    text = [
        "## Order server: speed\n",
        "`OMP_NUM_THREADS=1 python -m benchmarks.cd_grab.server_speed`; one thread, medians of "
        "repeats taken in turn with the read of 200 MB that sets the limit. The paper's server "
        "gets a pair's two gradients (8 d bytes); ours gets their difference (4 d bytes), a "
        "limit twice as high.\n",
        table(head, rows),
        "Plain dot and axpy is what NumPy can do best: blocks that join the axpy of one pair to "
        "the dot of the next, and Gram matrices of the differences of a step in blocks of 16,384 "
        "or 32,768 numbers, gave the same signs and were tried: none was faster here. A pair needs "
        "five passes over vectors (dot: r, z; axpy: r, z, r again), of which the limit counts "
        "one; at d = 1,000,000 on a shared machine r and z leave the cache in between.\n",
        table(
            ["a round of the whole server", "nodes", "pairs each", "pairs/s", "vectors in memory"],
            [
                [
                    f"{'whole gradients' if x['exact'] else 'sketches'} of {x['dim']:,}",
                    f"{x['nodes']}",
                    f"{x['pairs-per-node']}",
                    f"{x['pairs-per-s']:,}",
                    f"{x['extra-vectors']}",
                ]
                for x in rounds
            ],
        ),
        "With whole gradients the server holds (1 + m) vectors beside the reports; "
        "`tests/core/test_order_server.py` guards it.\n",
    ]
    return "\n".join(text)


# --- training ---------------------------------------------------------------------------------


def final(line: Line, key: str) -> float:
    return float(np.mean(line[key][-LAST:]))


def ratio(ours: dict[int, float], base: dict[int, float]) -> str:
    """Divide the means over the seeds that both have."""
    both = sorted(ours.keys() & base.keys())
    return f"{np.mean([ours[s] for s in both]) / np.mean([base[s] for s in both]):.2f}"


def training() -> str:
    lines = read("training")
    least = {(x["num_examples"], x["l2"], x["seed"]): x["value"] for x in read("optimum")}
    text = [
        "## Training with the paper's synchronous steps\n",
        "Fashion-MNIST, first examples of the shuffled training set; one step of all nodes at a "
        "time, constant step size, no momentum, the same settings for all methods. Walks, "
        "samplers, records and order server are the package's (`parallel.py`), without Flower's "
        "messages; the last section compares. Excess is the objective (cross-entropy + l2 / 2 "
        f"|w|^2) above its least value, mean of the last {LAST} epochs; accuracy on the first "
        "2,000 test images. `x D-RR` is the ratio of means over the seeds. Order bytes: of the "
        "bytes that models and gradients take (8 d per node and step).\n",
    ]
    for (case,), runs in grouped(lines, "case").items():
        first = runs[0]
        convex = first["model"] == "softmax"
        key = (first["num_examples"], first["l2"])
        units = first["num_examples"] // first["nodes"] // first["batch_size"]
        text.append(
            f"### {case}\n\nd = {first['dim']:,}, {first['num_examples']} examples, "
            f"{units} units of {first['batch_size']} per node, step {first['lr']}, "
            f"l2 {first['l2']}, {first['epochs']} epochs.\n"
        )
        rows, base, base_herding = [], {}, {}
        for (name,), mine in grouped([{**x, "name": name_of(x)} for x in runs], "name").items():
            loss = {
                x["seed"]: final(x, "loss") - (least[(*key, x["seed"])] if convex else 0.0)
                for x in mine
                if not convex or (*key, x["seed"]) in least
            }
            if not loss:
                continue
            herding = {x["seed"]: float(np.mean(x["herding"])) for x in mine}
            if name == "D-RR":
                base, base_herding = loss, herding
            share = sum(x["order-bytes"] for x in mine) / sum(x["model-bytes"] for x in mine)
            rows.append(
                [
                    name,
                    f"{len(loss)}",
                    spread(list(loss.values())),
                    ratio(loss, base),
                    f"{100 * np.mean([final(x, 'accuracy') for x in mine]):.1f} %",
                    ratio(herding, base_herding),
                    f"{100 * share:.2g} %" if share else "0",
                ]
            )
        what = "excess of the objective" if convex else "training loss"
        head = ["order", "seeds", what, "x D-RR", "test accuracy", "herding bound x D-RR"]
        text.append(table([*head, "order bytes"], rows))
    text.append(
        "![Loss against epochs](training.png)\n\nNot measured here for want of time: 4 and 64 "
        "nodes, the smaller step, and LeNet at any length that lets it converge; "
        "`python -m benchmarks.cd_grab.run DATASET` runs what is missing. ID-GraB(PairBal) does "
        "worse than random orders in the convex case: while weights move, its herding bound over "
        "all nodes is no better than theirs, other than for fixed gradients (below). The reason "
        "was not found.\n"
    )
    return "\n".join(text)


def draw_training(lines: list[Line]) -> None:
    """Draw loss against epochs and accuracy against bytes, a row per case of 8 nodes or more."""
    mpl.use("Agg")
    cases = list(dict.fromkeys(x["case"] for x in lines))[:4]
    looks: dict[str, dict[str, Any]] = {}
    with LIGHT.applied():
        figure, grid = plt.subplots(len(cases), 2, figsize=(9, 2.9 * len(cases)), squeeze=False)
        for (by_epoch, by_bytes), case in zip(grid, cases, strict=True):
            mine = [{**x, "name": name_of(x)} for x in lines if x["case"] == case]
            for (name,), runs in grouped(mine, "name").items():
                look = looks.setdefault(name, run_look(len(looks)))
                loss = np.mean([x["loss"] for x in runs], axis=0)
                accuracy = np.mean([x["accuracy"] for x in runs], axis=0)
                total = np.mean([x["model-bytes"] + x["order-bytes"] for x in runs]) / 1e6
                by_epoch.plot(np.arange(len(loss)), loss, label=name, **look)
                megabytes = np.linspace(0, total, len(accuracy))
                by_bytes.plot(megabytes, 100 * accuracy, **look)
            late = np.concatenate([x["loss"][len(x["loss"]) // 4 :] for x in mine])
            by_epoch.set_ylim(0.98 * late.min(), np.quantile(late, 0.95))
            by_epoch.set(title=case, xlabel="epoch", ylabel="objective")
            by_bytes.set(title=case, xlabel="MB exchanged", ylabel="test accuracy (%)")
            best = 100 * max(max(x["accuracy"]) for x in mine)
            by_bytes.set_ylim(best - (8 if "softmax" in case else 35), best + 1)
        handles = [plt.Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="lower center", ncols=4)
        figure.tight_layout(rect=(0, 0.16 / len(cases), 1, 1))
        figure.savefig(HERE / "training.png", dpi=75)
        plt.close(figure)


# --- sketches and bytes -----------------------------------------------------------------------


def sketches() -> str:
    lines = read("sketches")
    if not lines:
        return ""
    methods = list(dict.fromkeys(x["method"] for x in lines))
    rows = []
    for (model, dim), runs in grouped(lines, "model", "dim").items():
        bound = {key: x["bound"] for x in runs for key in [(x["method"], x["seed"])]}
        seeds = sorted({x["seed"] for x in runs if (methods[-1], x["seed"]) in bound})
        if not seeds:
            continue
        ratios = {m: [bound[m, s] / bound["D-RR", s] for s in seeds] for m in methods}
        alone = ratios["ID-GraB(PairBal)"]
        worth = [
            m
            for m in methods
            if m.isdigit() and all(a < b for a, b in zip(ratios[m], alone, strict=True))
        ]
        cells = [spread(ratios[m], 2) for m in methods[1:]]
        rows.append(
            [model, f"{dim:,}", f"{len(seeds)}", *cells, f"k = {worth[0]}" if worth else "none"]
        )
    head = [f"k = {m}" if m.isdigit() else m for m in methods[1:]]
    return "\n".join(
        [
            "## Which sketch is worth its bytes\n",
            "`python -m benchmarks.cd_grab.sketches DATASET`: fixed gradients of partly trained "
            "models, 8 nodes with 64 units of 4 examples; herding bound in the full space as a "
            "multiple of random orders'. Worth its bytes is the smallest k that beats "
            "ID-GraB(PairBal), which sends nothing, with every seed.\n",
            table(["model", "d", "seeds", *head, "smallest worth its bytes"], rows),
        ]
    )


def traffic() -> str:
    rows = []
    for dim in (7_850, 61_706, 238_510, 1_000_000, 11_700_000):
        cells = []
        for per_round in (1, 64, 512):
            for size in (256, 1024):
                sent = min(size, dim) * 2 * per_round / 2
                cells.append(f"{100 * sent / (8 * dim):.2g} %")
        rows.append([f"{dim:,}", *cells])
    head = ["d"]
    for per_round in ("1 step", "64 steps", "512 steps"):
        head += [f"{per_round} a round, k = 256", f"{per_round}, k = 1024"]
    return "\n".join(
        [
            "## Extra traffic\n",
            "Two bytes a number, one sketch per pair, against the model down and up again "
            "(8 d bytes a round); signs are a sixteenth of a byte per step. Computed; the shares "
            "that runs have counted are in the tables of training.\n",
            table(head, rows),
            "One step a round, as in the paper, stays far under 1 % from a million parameters "
            "up. Where a round is a whole pass of n units, k = 1024 is under 1 % of the exchange "
            "only up to n = d / 12,800 units (78 at a million parameters), k = 256 up to four "
            "times that: a round that trains longer sends models less often, not pairs.\n",
        ]
    )


# --- fleets -----------------------------------------------------------------------------------


def fleet() -> str:
    lines = read("fleet")
    if not lines:
        return ""
    methods = list(dict.fromkeys(x["method"] for x in lines))
    rows = []
    for (case,), runs in grouped(lines, "case").items():
        bound = {(x["method"], x["seed"]): x["bound"] for x in runs}
        seeds = sorted({s for m, s in bound if m == methods[-1]})
        if not seeds:
            continue
        mean = {m: [bound[m, s] / bound["D-RR", s] for s in seeds] for m in methods}
        ours, alone = np.mean(mean[methods[-1]]), np.mean(mean["ID-GraB(PairBal)"])
        cells = [spread(mean[m], 2) for m in methods[1:]]
        rows.append([case, f"{len(seeds)}", *cells, f"{ours / alone:.2f}"])
    return "\n".join(
        [
            "## Fleets that are not the paper's\n",
            "`python -m benchmarks.cd_grab.fleet DATASET`: fixed gradients of softmax regression, "
            "16 nodes with 64 units, 40 rounds of one pass, k = 1024; herding bound of those "
            "who walked, mean of the last 10 rounds, as a multiple of random orders'. *Paper* is "
            "Algorithm 4 with one common sum whatever happens; *ours* gives a node's own sum a "
            "say as its company changes. A lost reply loses its pairs. The noisy node's own bound "
            "does not count.\n",
            table(["case", "seeds", *methods[1:], "ours / ID-GraB(PairBal)"], rows),
        ]
    )


def local_grid() -> str:
    lines = read("local_grid")
    if not lines:
        return ""
    checks = [x for x in lines if x["case"] == "check"]
    text = ["## Through Flower's messages (LocalGrid)\n"]
    text += [
        f"Exact CD-GraB, 8 nodes, 48 one-step rounds with and without messages: losses differ by "
        f"at most {x['apart']:g}.\n"
        for x in checks
    ]
    rows = []
    for (case,), runs in grouped([x for x in lines if x["case"] != "check"], "case").items():
        base = None
        for (name,), mine in grouped([{**x, "name": name_of(x)} for x in runs], "name").items():
            excess = [final(x, "loss") - x["optimum"] for x in mine]
            base = float(np.mean(excess)) if name == "D-RR" else base
            share = sum(x["order-bytes"] for x in mine) / sum(x["model-bytes"] for x in mine)
            rows.append(
                [
                    case,
                    name,
                    f"{len(mine)}",
                    spread(excess),
                    f"{np.mean(excess) / base:.2f}" if base else "",
                    f"{100 * np.mean([final(x, 'accuracy') for x in mine]):.1f} %",
                    f"{100 * share:.3g} %" if share else "0",
                ]
            )
    if rows:
        text.append(
            "`python -m benchmarks.cd_grab.training DATASET`: softmax regression, 1,024 examples, "
            "one local pass a round, step 0.03, l2 0.01; excess over the least value of the "
            "objective, mean of the last 5 rounds. With one seed and 5 nodes a round, whose own "
            "data pull the model to and fro, these rows show that runs work and what they send, "
            "not which order is better: which nodes are drawn last weighs more than any order.\n"
        )
        head = ["case", "order", "seeds", "excess", "x D-RR", "test accuracy", "order bytes"]
        text.append(table(head, rows))
    return "\n".join(text)


def main() -> None:
    draw_training(read("training"))
    parts = [
        "# CD-GraB\n\nMade by `report.py` from the json lines beside it. flwr 1.41.0, torch "
        "2.12.1 (CPU), NumPy 2.4.6, Python 3.11; 2 cores of an Intel Xeon at 2.8 GHz with other "
        "work on them. Spread is the standard deviation over seeds.\n",
        summary(),
        synthetic(),
        speed(),
        training(),
        sketches(),
        traffic(),
        fleet(),
        local_grid(),
    ]
    text = "\n".join(part for part in parts if part)
    (HERE / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
