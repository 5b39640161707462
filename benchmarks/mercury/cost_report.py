"""The report's part on what Mercury costs: estimators, the sampler itself, overlap."""

from curves import Line, read

FLOOR_S = 6.1
"""Seconds of the shortest round seen in a deployment of Flower 1.41 with a client that does
nothing."""


def estimator_section() -> list[str]:
    lines = read("estimators.jsonl")
    if not lines:
        return []
    rows = [
        f"| {line['estimator']} | {line['bias_percent']:+.2f} ± {line['error_percent']:.2f} % | "
        f"{line['variance_of_uniform']:.2f} |"
        for line in lines
    ]
    return [
        "## Bias and variance of the estimators",
        "",
        "Groups of 4, 10, 6, 20, 8 samples with unequal means, batches of 8 from 2 groups and",
        "beta = 1; ± is the standard error; `python benchmarks/mercury/estimators.py`. An",
        "estimator is unbiased where the bias is within about two standard errors of 0.",
        "",
        "| estimator | bias of the mean gradient | variance, uniform = 1 |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]


def overhead_section() -> list[str]:
    lines = read("overhead.jsonl")
    if not lines:
        return []
    rows = [
        f"| {line['case']} | {line['percent_of_step']} % | {line['lowest']} to {line['highest']} |"
        for line in lines
    ]
    return [
        "## Cost of the sampler itself",
        "",
        "`next_batch` plus `update`, as a share of a training step of the 28x28 CNN at batch 32,",
        "one thread, the two in turns; `python benchmarks/mercury/overhead.py`.",
        "",
        "| case | median | range |",
        "| --- | --- | --- |",
        *rows,
        "",
        "The target, under 2 % at 60,000 samples, is met by `flat`. On few samples less is drawn",
        "ahead at a time, so that importance stays fresh, and a step costs more. `cycle` and",
        "`paper` add up a group's probabilities for each batch.",
        "",
    ]


def overlap_section() -> list[str]:
    text = ["## Overlap on real devices", ""]
    rows = [
        f"| {line['samples']} | {line['training s']} | {line['handing over s']} | "
        f"{line['collecting s']} | {line['added s']} ({line['lowest s']} to {line['highest s']}) | "
        f"{100 * line['added s'] / FLOOR_S:.1f} % |"
        for line in read("handover.jsonl")
    ]
    if rows:
        text += [
            "What scoring in the background adds to a node's own part of a round: a detached",
            "process of the lowest priority scores, so it is the time to hand model and samples",
            "over and to collect the scores. Medians, on a machine busy with other work;",
            "`python benchmarks/mercury/handover.py`. The last column is the share of the shortest",
            f"round of a deployment with this version of Flower, {FLOOR_S} s (a SuperNode polls",
            "for work every 3 s and starts a process per message).",
            "",
            "| samples of 28x28 | 20 steps of training, s | handing over, s | collecting, s | "
            "added, s | of the shortest round |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    rows = [
        f"| {line['mbps']:g} | {line['free']['median_s']} ({span(line['free'])}) | "
        f"{line['bacc']['median_s']} ({span(line['bacc'])}) | {line['ratio']:.3f} | "
        f"{len(line['bacc']['rounds_s'])} | {line['bacc']['scored']:.0%} | "
        f"{len(line['leftovers'])} |"
        for line in read("overlap.jsonl")
    ]
    if rows:
        text += [
            "Whole rounds: SuperLink and two SuperNodes on one machine behind slow links,",
            '`apps/mercury` with `sampling="free"` and `"bacc"`;',
            "`PYTHONPATH=. python benchmarks/mercury/overlap.py`. The machine had two cores, was",
            "busy with other work, and every message starts new processes, so that rounds are long",
            "and vary: the ratio is worth what their spread is.",
            "",
            "| Mbit/s | without scoring, s (lowest to highest) | scoring in the background, s | "
            "ratio of medians | rounds each | samples scored | folders left |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    else:
        text += [
            "The node's own part stays below the target of 5 %. Whole rounds of a deployment",
            "with and without scoring (`overlap.py`) are not measured, for want of a quiet host:",
            "what the detached process costs others on the same cores is open.",
            "",
        ]
    return text if rows or len(text) > 7 else []


def span(found: Line) -> str:
    return f"{min(found['rounds_s'])} to {max(found['rounds_s'])}"
