"""The report's part on orders and the order server: speed, sketches, traffic, odd fleets."""

import numpy as np

from benchmarks.cd_grab.lines import grouped, read, spread, table


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
        "Ours is the plain dot and axpy in NumPy. Blocks that join the axpy of one pair to the dot "
        "of the next, and Gram matrices of the differences of a step in blocks of 16,384 or 32,768 "
        "numbers, gave the same signs and were tried: none was faster here. A loop in torch, which "
        "fuses the axpy, is; the core of this package does without torch. A pair needs five passes "
        "over vectors (dot: r, z; axpy: r, z, r again), of which the limit counts one; at "
        "d = 1,000,000 r and z leave the cache in between.\n",
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
