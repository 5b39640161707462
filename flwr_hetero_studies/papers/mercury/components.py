"""Figures 13 to 15: each technique against what it replaces."""

from dataclasses import replace

from flwr_hetero_studies.core.experiment import ENOUGH, Claim, Finding, times
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.race import cell, curve, end_of, gain, plateau, written
from flwr_hetero_studies.papers.mercury.speed import GROUP
from flwr_hetero_studies.papers.mercury.training import MERCURY, Sampling


def compare(
    options: Options, methods: dict[str, Sampling], published: tuple[float, float]
) -> Finding:
    """Compare the second method with the first: more iterations, and less time."""
    task = cell(options, "images")
    runs = {name: task.train(method) for name, method in methods.items()}
    (_, base), (name, _) = runs.items()
    rows = []
    for (each, run), (steps, speed) in zip(runs.items(), ((1, 1), published), strict=True):
        in_steps, faster = gain(base, run, "steps"), gain(base, run)
        more = 1 / in_steps if in_steps else float("inf")
        step_s = f"{run.seconds[-1] / run.steps[-1]:.1f}"
        paper = f"{steps:.2f}, {speed:.2f}x"
        rows.append((each, f"{more:.2f}", written(faster), paper, step_s, end_of(run)))
    wanted = published[0] - 1
    claims = [
        Claim(f"{name} needs few iterations more (at most twice as many more)",
              f"{wanted:.0%} more", f"{more - 1:+.0%}", more - 1 <= 2 * wanted),
        times(f"{name} is faster in total time", published[1], faster),
    ]  # fmt: skip
    head = ("method", "iterations, relative", "speedup", "paper", "seconds a step", "end accuracy")
    curves = {each: curve(run, "seconds") for each, run in runs.items()}
    return Finding(head, rows, claims, curves, ("seconds", "test accuracy, %"))


def figure_13(options: Options) -> Finding:
    """Score a group per step, or all local data."""
    ours = Sampling("paper", share=GROUP, is_hidden=False)
    methods = {"all-inclusive": replace(ours, share=1.0), "group-wise": ours}
    return compare(options, methods, (1.2, 4.2))


def figure_15(options: Options) -> Finding:
    """Score during the exchange of gradients, or before each batch."""
    methods = {"sequential": replace(MERCURY, is_hidden=False), "BACC": MERCURY}
    return compare(options, methods, (1.05, 2.2))


RESHARDING = {
    "none": ("", 0.0, ""),
    "random, a third of the data": ("random", 1 / 3, "+1.84 points"),
    "by importance, a sixth": ("importance", 1 / 6, "the same"),
    "random, a sixth": ("random", 1 / 6, ""),
}
"""Which samples move, how many of a device's data in all, and what the paper finds."""


def figure_14(options: Options) -> Finding:
    """Move samples between devices at random, or important ones only and half as many."""
    iid = cell(options, "images")
    splits = {"IID": iid, "Dirichlet 0.5": iid.changed(alpha=0.5)}
    rows, ends = [], []
    for name, (which, share, paper) in RESHARDING.items():
        method = replace(MERCURY, resharding=which, reshard_share=share)
        runs = [task.train(method) for task in splits.values()]
        rows.append((name, runs[0].moved, *map(end_of, runs), paper))
        ends.append(100 * plateau(runs[0]))
    raised, kept = ends[1] - ends[0], ends[2] - ends[1]
    claims = [
        Claim("Resharding raises the accuracy (IID, at least 2/3 of it)", "by up to 1.84 points",
              f"{raised:+.2f} points", raised >= ENOUGH * 1.84),
        Claim("By importance half the transfer gives the same (IID, within a quarter point)",
              "50 % of the data", f"{kept:+.2f} points with half of it", kept >= -0.25),
    ]  # fmt: skip
    head = ("resharding", "samples moved", *(f"{split}: end" for split in splits), "paper")
    return Finding(head, rows, claims)
