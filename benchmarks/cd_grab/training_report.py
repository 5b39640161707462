"""The report's part on training: with every order, and through Flower's messages."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.cd_grab.lines import (
    HERE,
    LAST,
    Line,
    final,
    grouped,
    name_of,
    ratio,
    read,
    spread,
    table,
)
from benchmarks.cd_grab.run import CASES
from flwr_hetero.report.style import LIGHT, run_look


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
        "![Loss against epochs](training.png)\n\nID-GraB(PairBal) does worse than random orders in "
        "the convex case with 8 nodes: while weights move, its herding bound over all nodes is no "
        "better than theirs, other than for fixed gradients (below), and its orders stay much the "
        "same from pass to pass, so that their error does not average out as that of fresh orders "
        "does. That this costs as much shows in `shuffle once`, an order that never changes. "
        "LeNet is far from converged at this length. "
        f"{missing(lines)}\n"
    )
    return "\n".join(text)


def missing(lines: list[Line]) -> str:
    """Say which runs of ``run.py`` are not there."""
    there = grouped(lines, "case")
    gone = [case for case in CASES if (case,) not in there]
    text = f"Not run: {'; '.join(gone)}. " if gone else ""
    return text + "`python -m benchmarks.cd_grab.run DATASET` runs what is missing."


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
