"""Herding bounds, excess loss and speed, beside the paper's and an independent implementation's."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.tables import (
    Line,
    by,
    by_seed,
    draw,
    last,
    metric,
    of,
    read,
    seeds,
    software,
    spread,
    table,
)

BASE, ALONE = "D-RR", "ID-GraB(PairBal)"
LAST = 5
"""Epochs at the end of a run that are averaged."""
PAPER = {
    "ID-GraB(Bal)": {5: 4.2, 10: 5.8, 20: 8.5, 50: 12.5, 100: 17.5},
    "ID-GraB(PairBal)": {5: 6.0, 10: 8.5, 20: 12.0, 50: 18.0, 100: 23.5},
    "CD-GraB": {5: 2.6, 10: 2.5, 20: 2.5, 50: 2.3, 100: 2.3},
}
"""Read off the paper's Fig. 10, a million vectors."""
TWIN = {
    1_000_000: {
        "D-RR": {5: 342, 10: 317, 20: 343, 50: 407, 100: 397},
        "ID-GraB(Bal)": {5: 4.26, 10: 5.83, 20: 8.01, 50: 11.9, 100: 16.9},
        "ID-GraB(PairBal)": {5: 6.37, 10: 8.39, 20: 11.5, 50: 17.6, 100: 25.0},
        "CD-GraB": {5: 2.66, 10: 2.48, 20: 2.45, 50: 2.44, 100: 2.21},
    },
    65_536: {
        "D-RR": {4: 92.3, 16: 99.0, 64: 81.0},
        "ID-GraB(Bal)": {4: 3.58, 16: 6.34, 64: 12.7},
        "ID-GraB(PairBal)": {4: 4.94, 16: 9.07, 64: 17.0},
        "CD-GraB": {4: 2.52, 16: 2.24, 64: 2.07},
    },
}
"""An independent implementation that is not part of this package, other seeds."""


def settled(lines: Iterable[Line]) -> list[float]:
    """Return each run's herding bound, mean of the last 3 rounds."""
    return [last(line, "bounds", 3) for line in lines]


def ratio(ours: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Divide the means over the seeds that both have."""
    both = sorted(ours.keys() & base.keys())
    if not both:
        return ""
    return f"{np.mean([ours[s] for s in both]) / np.mean([base[s] for s in both]):.2f}"


# --- in short -------------------------------------------------------------------------------


def summary(groups: Mapping[str, list[Line]]) -> str:
    """Tabulate what was wanted and what is measured."""
    rows = []
    million = of(groups.get("fig10", []), vectors=1_000_000, method="CD-GraB")
    if million:
        ours = [float(np.mean(settled(own))) for own in by(million, "nodes").values()]
        rows.append(["Fig. 10: the bound does not grow with the number of nodes", "2.3 to 2.6",
                     f"{min(ours):.2f} to {max(ours):.2f}, {len(ours)} numbers of nodes"]
                    )  # fmt: skip
    if main := groups.get("softmax, 8 nodes"):
        found = excess(main, least_of(groups))
        for name, what, wanted in (
            ("CD-GraB, exact", "excess loss at the larger step, exact / D-RR", "at most 0.5"),
            ("CD-GraB, k = 1024", "the same, sketches of 1,024", "at most 0.6"),
        ):
            if name in found:
                rows.append([what, wanted, ratio(found[name], found[BASE])])
    if balance := groups.get("pair balance"):
        limits = ", ".join(
            f"{m['of_reading_two_gradients']:.2f} / {m['of_reading_the_difference']:.2f} "
            f"({line['case']['name']})"
            for line in balance
            for m in [line["metrics"]]
        )
        what = "share of the limit by reading two gradients / the difference"
        rows.append([what, "at least 0.5", limits])
    if fleets := fleet_ratios(groups.get("fleet", [])):
        worst = max(fleets, key=lambda name: fleets[name])
        what = "never worse than ID-GraB(PairBal): worst ratio of bounds"
        rows.append([what, "at most 1", f"{fleets[worst]:.2f} ({worst})"])
    return table(["what", "wanted", "measured"], rows) + "\n"


# --- fixed vectors --------------------------------------------------------------------------


def fig10(lines: list[Line], folder: Path) -> str:
    """Tabulate and draw the paper's Fig. 10."""
    text = (
        "## Fixed vectors (the paper's Fig. 10)\n\nHerding bound of vectors of 16 numbers, mean of "
        "the last 3 of 15 rounds, ± standard deviation over seeds. In [ ]: an independent "
        "implementation that is not part of this package, other seeds. In { }: read off the "
        "paper's figure. `walk` is the rule of the theory, which is no longer run here.\n\n"
    )
    for number, own in by(lines, "vectors").items():
        methods, rows, panels = by(own, "method"), [], {}
        for nodes, each in sorted(by(own, "nodes").items()):
            cells, curves = [], {}
            for method in methods:
                runs = of(each, method=method)
                cells.append(fig10_cell(runs, number, method, nodes) if runs else "not run")
                bounds = [line["curve"]["bounds"] for line in runs]
                if bounds:
                    curves[method] = (range(1, len(bounds[0]) + 1), np.mean(bounds, axis=0))
            rows.append([nodes, *cells])
            panels[f"{nodes} nodes"] = curves
        took = sum(metric(methods.get("CD-GraB", []), "took_s"))
        name = f"synthetic_{number}.png"
        labels = ("round", "herding bound (Eq. 8)")
        draw(panels, folder / name, *labels, columns=5, size=(2.6, 2.9), yscale="log")
        text += (
            f"### {number:,} vectors, {len(seeds(own))} seed(s)\n\nAll runs of CD-GraB together "
            f"took {took:.0f} s on a loaded machine.\n\n{table(['nodes', *methods], rows)}\n"
            f"![Herding bound]({name})\n\n"
        )
    return text


def fig10_cell(runs: list[Line], number: int, method: str, nodes: int) -> str:
    twin = TWIN.get(number, {}).get(method, {}).get(nodes)
    paper = PAPER.get(method, {}).get(nodes) if number == 1_000_000 else None
    cell = spread(settled(runs)) + (f" [{twin:g}]" if twin else "")
    return cell + (f" {{{paper:g}}}" if paper else "")


def bounds_of(lines: list[Line], final: str) -> dict[str, list[float]]:
    """Return each method's bounds as multiples of random orders', seed by seed."""
    found = {(line["case"]["method"], line["seed"]): line["metrics"]["bound"] for line in lines}
    both = sorted(s for method, s in found if method == final and (BASE, s) in found)
    methods = [m for m in by(lines, "method") if all((m, s) in found for s in both)]
    return {m: [found[m, s] / found[BASE, s] for s in both] for m in methods} if both else {}


def sketch(lines: list[Line]) -> str:
    """Say which sketch is worth its bytes."""
    rows, names = [], [name for name in by(lines, "method") if name != BASE]
    for model, runs in by(lines, "model").items():
        found = bounds_of(runs, names[-1])
        if not found or ALONE not in found:
            continue
        worth = [
            name.removeprefix("CD-GraB, ")
            for name in names
            if "k = " in name and all(a < b for a, b in zip(found[name], found[ALONE], strict=True))
        ]
        cells = [spread(found[name], ".2g") for name in names]
        dim = f"{runs[0]['metrics']['dim']:,}"
        rows.append([model, dim, len(found[ALONE]), *cells, worth[0] if worth else "none"])
    head = [name.removeprefix("CD-GraB, ").replace("exact", "whole gradients") for name in names]
    return (
        "## Which sketch is worth its bytes\n\nFixed gradients of partly trained models, 8 nodes "
        "with 64 units of 4 examples; herding bound in the full space as a multiple of random "
        "orders'. Worth its bytes is the smallest k that beats ID-GraB(PairBal), which sends "
        "nothing, with every seed.\n\n"
        + table(["model", "d", "seeds", *head, "smallest worth its bytes"], rows) + "\n"
    )  # fmt: skip


def fleet(lines: list[Line]) -> str:
    """Tabulate bounds in fleets that are not the paper's."""
    rows, names = [], [name for name in by(lines, "method") if name != BASE]
    for name, runs in by(lines, "fleet").items():
        if found := bounds_of(runs, names[-1]):
            cells = [spread(found[m], ".2g") if m in found else "" for m in names]
            own = np.mean(found[names[-1]]) / np.mean(found.get(ALONE, [np.nan]))
            rows.append([name, len(found[names[-1]]), *cells, f"{own:.2f}"])
    return (
        "## Fleets that are not the paper's\n\nFixed gradients of softmax regression, 16 nodes "
        "with 64 units, 40 rounds of one pass, k = 1024; herding bound of the nodes that took "
        "part, mean of the last 10 rounds, as a multiple of random orders'. *Paper* is Algorithm 4 "
        "with one common sum whatever happens; *ours* gives a node's own sum a weight as its group "
        "changes. A lost reply loses its pairs. The noisy node's own bound does not count.\n\n"
        + table(["case", "seeds", *names, "ours / ID-GraB(PairBal)"], rows) + "\n"
    )  # fmt: skip


def fleet_ratios(lines: list[Line]) -> dict[str, float]:
    """Divide the bounds of ours by ID-GraB(PairBal)'s, by case, over the seeds that are there."""
    result = {}
    for name, runs in by(lines, "fleet").items():
        methods = by(runs, "method")
        ours, alone = (by_seed(methods.get(m, [])) for m in ("CD-GraB, ours", ALONE))
        if both := ours.keys() & alone.keys():
            sums = [sum(each[s]["metrics"]["bound"] for s in both) for each in (ours, alone)]
            result[name] = sums[0] / sums[1]
    return result


# --- speed and traffic ----------------------------------------------------------------------


def speed(balance: list[Line], rounds: list[Line]) -> str:
    """Tabulate the order server's speed."""
    keys = ("ours_pairs_per_s", "numpy_pairs_per_s", "torch_pairs_per_s")
    rows = [
        [f"{line['case']['dim']:,}", *(f"{m[key]:,}" for key in keys), m["read_gb_per_s"],
         f"{m['of_reading_two_gradients']:.2f}", f"{m['of_reading_the_difference']:.2f}",
         m["extra_vectors"]]
        for line in balance for m in [line["metrics"]]
    ]  # fmt: skip
    head = ["d", "pairs/s, ours", "NumPy loop", "torch loop", "read GB/s",
            "of reading two gradients", "of reading the difference",
            "extra memory, vectors"]  # fmt: skip
    whole = [
        [f"{'whole gradients' if case['dim'] > 1024 else 'sketches'} of {case['dim']:,}",
         case["nodes"], case["pairs"], f"{line['metrics']['pairs_per_s']:,}",
         line["metrics"]["extra_vectors"]]
        for line in rounds for case in [line["case"]]
    ]  # fmt: skip
    return (
        "## Order server: speed\n\nOne thread, medians of repeats taken in turn with the read of "
        "200 MB that sets the limit. The paper's server gets a pair's two gradients (8 d bytes); "
        "ours gets their difference (4 d bytes), a limit twice as high.\n\n"
        + (table(head, rows) + "\n" if rows else "")
        + "Ours is the plain dot and axpy in NumPy. Blocks that join the axpy of one pair to the "
        "dot of the next, and Gram matrices of the differences of a step in blocks of 16,384 or "
        "32,768 numbers, gave the same signs and were tried: none was faster here. A loop in "
        "torch, which fuses the axpy, is; the package's server does without torch. A pair needs "
        "five passes over vectors (dot: r, z; axpy: r, z, r again), of which the limit counts one; "
        "at d = 1,000,000 r and z leave the cache in between.\n\n"
        + table(["a round of the whole server", "nodes", "pairs each", "pairs/s",
                 "vectors in memory"], whole)
        + "\nWith whole gradients the server holds (1 + m) vectors beside the reports.\n\n"
    )  # fmt: skip


def traffic() -> str:
    """Compute the bytes of orders as shares of the models'."""
    rows, per_rounds, sizes = [], (1, 64, 512), (256, 1024)
    for dim in (7_850, 61_706, 238_510, 1_000_000, 11_700_000):
        shares = [min(k, dim) * 2 * n / 2 / (8 * dim) for n in per_rounds for k in sizes]
        rows.append([f"{dim:,}", *(f"{100 * share:.2g} %" for share in shares)])
    steps = ("1 step", "64 steps", "512 steps")
    head = [f"{n}{' a round' * (k == 256)}, k = {k}" for n in steps for k in sizes]
    return (
        "## Extra traffic\n\nTwo bytes a number, one sketch per pair, against the model down and "
        "up again (8 d bytes a round); signs are a sixteenth of a byte per step. Computed; the "
        "shares that runs have counted are in the tables of training.\n\n"
        + table(["d", *head], rows)
        + "\nOne step a round, as in the paper, stays far under 1 % from a million parameters up. "
        "Where a round is a whole pass of n units, k = 1024 is under 1 % of the exchange only up "
        "to n = d / 12,800 units (78 at a million parameters), k = 256 up to four times that: a "
        "round that trains longer sends models less often, not pairs.\n\n"
    )


# --- training -------------------------------------------------------------------------------

Least = Mapping[tuple[int, float, int], float]


def least_of(groups: Mapping[str, list[Line]]) -> Least:
    """Return the least value of the objective by examples, l2 and seed."""
    lines = [(line, line["case"]) for line in groups.get("optimum", [])]
    return {(c["num_examples"], c["l2"], x["seed"]): x["metrics"]["value"] for x, c in lines}


def excess(lines: Sequence[Line], least: Least) -> dict[str, dict[int, float]]:
    """Return the final objective above its least value, by method and seed; else the loss."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        case, seed = line["case"], line["seed"]
        key = (case["num_examples"], case["l2"], seed)
        if case["model"] != "softmax":
            found.setdefault(case["name"], {})[seed] = last(line, "loss", LAST)
        elif key in least:
            found.setdefault(case["name"], {})[seed] = last(line, "loss", LAST) - least[key]
    return found


def order_share(lines: Sequence[Line], digits: str) -> str:
    share = sum(metric(lines, "order_bytes")) / sum(metric(lines, "model_bytes"))
    return f"{100 * share:{digits}} %" if share else "0"


def accuracy(lines: Sequence[Line]) -> str:
    return f"{100 * np.mean([last(line, 'accuracy', LAST) for line in lines]):.1f} %"


def training(groups: Mapping[str, list[Line]], folder: Path) -> str:
    """Tabulate and draw training with the paper's synchronous steps."""
    lines = [line for own in groups.values() for line in own if "herding" in line["metrics"]]
    text, least, panels = TRAINING, least_of(groups), {}
    for name, runs in by(lines, "experiment").items():
        case, m = runs[0]["case"], runs[0]["metrics"]
        units = case["num_examples"] // case["nodes"] // case["batch_size"]
        text += (
            f"### {name}\n\nd = {m['dim']:,}, {case['num_examples']} examples, {units} units of "
            f"{case['batch_size']} per node, step {case['lr']}, l2 {case['l2']}, "
            f"{case['epochs']} epochs.\n\n"
        )
        methods, found, rows = by(runs, "name"), excess(runs, least), []
        bounds = {
            n: {x["seed"]: x["metrics"]["herding"] for x in own} for n, own in methods.items()
        }
        for method, loss in found.items():
            own = methods[method]
            rows.append(
                [method, len(loss), spread(list(loss.values())), ratio(loss, found.get(BASE, {})),
                 accuracy(own), ratio(bounds[method], bounds.get(BASE, {})),
                 order_share(own, ".2g")]
            )  # fmt: skip
        what = "excess of the objective" if case["model"] == "softmax" else "training loss"
        head = ["order", "seeds", what, "x D-RR", "test accuracy", "herding bound x D-RR"]
        text += table([*head, "order bytes"], rows) + "\n"
        panels[name] = {n: mean_loss(own) for n, own in methods.items()}
    if lines:
        draw(panels, folder / "training.png", "epoch", "objective", size=(4.0, 2.6), yscale="log")
    return text + READING


def mean_loss(lines: Sequence[Line]) -> tuple[range, np.ndarray]:
    loss = np.mean([line["curve"]["loss"] for line in lines], axis=0)
    return range(len(loss)), loss


def through_flower(groups: Mapping[str, list[Line]]) -> str:
    """Tabulate training through Flower's messages."""
    text = "## Through Flower's messages (LocalGrid)\n\n"
    for line in groups.get("with and without messages", []):
        text += (
            "Exact CD-GraB, 8 nodes, 48 one-step rounds with and without messages: losses differ "
            f"by at most {line['metrics']['apart']:g}.\n\n"
        )
    lines, rows = [x for own in groups.values() for x in own if "optimum" in x["metrics"]], []
    for name, runs in by(lines, "experiment").items():
        methods = by(runs, "name")
        loss = {
            method: [last(line, "loss", LAST) - line["metrics"]["optimum"] for line in own]
            for method, own in methods.items()
        }
        for method, values in loss.items():
            own = methods[method]
            beside = f"{np.mean(values) / np.mean(loss[BASE]):.2f}" if BASE in loss else ""
            rows.append([name, method, len(own), spread(values), beside, accuracy(own),
                         order_share(own, ".3g")])  # fmt: skip
    head = ["case", "order", "seeds", "excess", "x D-RR", "test accuracy", "order bytes"]
    return text + (MESSAGES + table(head, rows) if rows else "")


TRAINING = """## Training with the paper's synchronous steps

Fashion-MNIST, first examples of the shuffled training set; one step of all nodes at a time, \
constant step size, no momentum, the same settings for all methods. Samplers, records and order \
server are the package's, without Flower's messages; the last section compares. Excess is the \
objective (cross-entropy + l2 / 2 |w|^2) above its least value, mean of the last 5 epochs; \
accuracy on the first 2,000 test images. `x D-RR` is the ratio of means over the seeds. Order \
bytes: of the bytes that models and gradients take (8 d per node and step).

"""
READING = """![Loss against epochs](training.png)

ID-GraB(PairBal) does worse than random orders in the convex case with 8 nodes: while weights \
move, its herding bound over all nodes is no better than theirs, other than for fixed gradients \
(below), and its orders stay much the same from pass to pass, so that their error does not \
average out as that of new orders does. That this costs as much shows in `shuffle once`, an order \
that never changes. LeNet is far from converged at this length.

"""
MESSAGES = """Softmax regression, 1,024 examples, one local pass a round, step 0.03, l2 0.01; \
excess over the least value of the objective, mean of the last 5 rounds. With one seed and 5 nodes \
a round, whose own data pull the model to and fro, these rows show that runs work and what they \
send, not which order is better: which nodes are drawn last weighs more than any order.

"""


def report(folder: Path) -> str:
    """Make the page and the figures from a folder's results."""
    lines = read(folder)
    groups = by(lines, "experiment")
    text = (
        "# CD-GraB\n\n`python -m benchmarks.bench cd_grab --data DIR`; `--set vectors=1000000` for "
        f"the paper's size. {software(lines, 'flwr', 'torch', 'numpy')}, Python 3.11; 2 cores of "
        "an Intel Xeon at 2.8 GHz, with other work on them but for the order server's speed. "
        f"Spread is the standard deviation over seeds.\n\n{summary(groups)}"
    )
    if "fig10" in groups:
        text += fig10(groups["fig10"], folder)
    if "server round" in groups:
        text += speed(groups.get("pair balance", []), groups["server round"])
    text += training(groups, folder)
    for section in (sketch, traffic, fleet):
        if section is traffic:
            text += traffic()
        elif section.__name__ in groups:
            text += section(groups[section.__name__])
    return text + through_flower(groups)
