"""Figures 13 to 15: each technique against what it replaces."""

from dataclasses import replace
from math import inf

from flwr_hetero_studies.core.experiment import ENOUGH, Claim, Finding, times
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.race import (
    Cell,
    cell,
    curve,
    gain,
    plateau,
    written,
)
from flwr_hetero_studies.papers.mercury.speed import GROUP
from flwr_hetero_studies.papers.mercury.training import MERCURY, Method


def compare(
    options: Options,
    methods: dict[str, Method],
    published: tuple[float, float],
) -> Finding:
    """Compare the second method with the first: more iterations, and less time."""
    task = cell(options, "images")
    runs = {name: task.train(method) for name, method in methods.items()}
    (_, base), (name, _) = runs.items()
    more_published, faster_published = published
    papers = ("1.00, 1.00x", f"{more_published:.2f}, {faster_published:.2f}x")
    rows, more, faster = [], inf, 0.0
    for (each, run), paper in zip(runs.items(), papers, strict=True):
        in_steps, faster = gain(base, run, "steps"), gain(base, run)
        more = 1 / in_steps if in_steps else inf
        step_s, end = run.seconds[-1] / run.steps[-1], 100 * plateau(run)
        rows.append((each, f"{more:.2f}", written(faster), paper, f"{step_s:.1f}", f"{end:.2f} %"))
    claims = [
        Claim(
            f"{name} needs few iterations more (at most twice as many more)",
            f"{more_published - 1:.0%} more",
            f"{more - 1:+.0%}",
            more - 1 <= 2 * (more_published - 1),
        ),
        times(f"{name} is faster in total time", faster_published, faster),
    ]
    head = ("method", "iterations, relative", "speedup", "paper", "seconds a step", "end accuracy")
    curves = {each: curve(run, "seconds") for each, run in runs.items()}
    return Finding(head, rows, claims, curves, ("seconds", "test accuracy, %"))


def figure_13(options: Options) -> Finding:
    """Score a group per step, or all local data."""
    ours = Method("paper", share=GROUP, is_hidden=False)
    methods = {"all-inclusive": replace(ours, share=1.0), "group-wise": ours}
    return compare(options, methods, (1.2, 4.2))


def figure_15(options: Options) -> Finding:
    """Score during the exchange of gradients, or before each batch."""
    methods = {"sequential": replace(MERCURY, is_hidden=False), "BACC": MERCURY}
    return compare(options, methods, (1.05, 2.2))


RESHARDING = {
    "none": ("", 0.0),
    "random, a third of the data": ("random", 1 / 3),
    "by importance, a sixth": ("importance", 1 / 6),
    "random, a sixth": ("random", 1 / 6),
}


def figure_14(options: Options) -> Finding:
    """Move samples between devices at random, or important ones only and half as many."""
    small = cell(options, "images")
    splits = {"IID": small.task, "Dirichlet 0.5": replace(small.task, alpha=0.5)}
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in RESHARDING}
    for task in splits.values():
        for name, (which, share) in RESHARDING.items():
            method = replace(MERCURY, resharding=which, reshard_share=share)
            run = Cell(task, small.seeds).train(method)
            found[name].append((plateau(run), run.moved))
    papers = ("", "+1.84 points", "the same", "")
    rows = [
        (name, pairs[0][1], *(f"{100 * accuracy:.2f} %" for accuracy, _ in pairs), paper)
        for (name, pairs), paper in zip(found.items(), papers, strict=True)
    ]
    none, agnostic, aware, _ = (pairs[0][0] for pairs in found.values())
    raised, kept = 100 * (agnostic - none), 100 * (aware - agnostic)
    claims = [
        Claim(
            "Resharding raises the accuracy (IID, at least 2/3 of it)",
            "by up to 1.84 points",
            f"{raised:+.2f} points",
            raised >= ENOUGH * 1.84,
        ),
        Claim(
            "By importance half the transfer gives the same (IID, within a quarter point)",
            "50 % of the data",
            f"{kept:+.2f} points with half of it",
            kept >= -0.25,
        ),
    ]
    return Finding(
        ("resharding", "samples moved", *(f"{s}: end" for s in splits), "paper"), rows, claims
    )
