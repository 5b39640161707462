"""The report's part on what Mercury costs: estimators, the sampler itself, overlap."""

from statistics import mean, stdev

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
        f"| {line['mbps']:g} | {mean_of(line['free'])} | {mean_of(line['bacc'])} | "
        f"{ratio_of(line)} | {line['ratio']:.3f} | {len(line['free']['rounds_s'])} | "
        f"{line['free']['mean_age']:.0f} and {line['bacc']['mean_age']:.0f} steps | "
        f"{len(line['leftovers'])} |"
        for line in read("overlap.jsonl")
    ]
    text += [
        "Whole rounds: SuperLink and two SuperNodes on one machine of two cores behind slow links,",
        '`apps/mercury` with `sampling="free"` and `"bacc"` in turns, with nothing else to do;',
        "`PYTHONPATH=. python benchmarks/mercury/overlap.py`. Rounds come in steps of the 3 s at",
        "which Flower polls (two heaps, about 10.5 and 13.5 s), so that the median jumps from one",
        "heap to the other and the mean says more; ± is its standard error. The nodes share both",
        "cores with the server and with each other's scoring, which a device of its own does not.",
        "",
        "| Mbit/s | without scoring, mean s | scoring in the background, mean s | ratio of means | "
        "of medians | rounds each | age of the scores | folders left |",
        "|" + " --- |" * 8,
        *rows,
        "",
        "Wanted: at most 5 % longer. The mean is within it, the spread does not exclude more.",
        "",
    ]
    return text


def mean_of(found: Line) -> str:
    """Write the mean of the rounds with its standard error."""
    rounds_s = found["rounds_s"]
    return f"{mean(rounds_s):.2f} ± {stdev(rounds_s) / len(rounds_s) ** 0.5:.2f}"


def ratio_of(line: Line) -> str:
    """Write the ratio of the means with its standard error."""
    with_s, without_s = line["bacc"]["rounds_s"], line["free"]["rounds_s"]
    ratio = mean(with_s) / mean(without_s)
    parts = [stdev(each) / mean(each) / len(each) ** 0.5 for each in (with_s, without_s)]
    return f"{ratio:.3f} ± {ratio * (parts[0] ** 2 + parts[1] ** 2) ** 0.5:.3f}"
