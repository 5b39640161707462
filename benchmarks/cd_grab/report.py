"""The report on CD-GraB from the json lines beside it: tables and plots, never runs anything.

Usage, from the top folder: ``python -m benchmarks.cd_grab.report``; writes ``report.md``,
``training.png`` and the plots of the synthetic experiment.
"""

from benchmarks.cd_grab import synthetic_report
from benchmarks.cd_grab.lines import HERE, read, table
from benchmarks.cd_grab.order_report import fleet, fleet_ratios, sketches, speed, traffic
from benchmarks.cd_grab.training_report import draw_training, excess_ratio, local_grid, training


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


def main() -> None:
    draw_training(read("training"))
    parts = [
        "# CD-GraB\n\nMade by `report.py` from the json lines beside it. flwr 1.41.0, torch "
        "2.12.1 (CPU), NumPy 2.4.6, Python 3.11; 2 cores of an Intel Xeon at 2.8 GHz, with other "
        "work on them but for the order server's speed. Spread is the standard deviation over "
        "seeds.\n",
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
