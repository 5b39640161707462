"""Turn ``results.jsonl`` into the table of ``report.md``; never runs anything."""

import json
from pathlib import Path

HERE = Path(__file__).parent

HEAD = """# Weighted mean of ArrayRecords, in place

Claim: at 50 nodes x 10 MB at least 2x faster and at most half the extra memory of
`flwr.serverapp.strategy.strategy_utils.aggregate_arrayrecords`, same result to rounding.
Both are timed turn by turn in one process; extra memory is the peak of `tracemalloc` during
one call, the result (10 MB) included.

| layout | Flower | ours | speed-up (least to most) | extra memory | difference | integers |
| --- | --- | --- | --- | --- | --- | --- |
"""

ROW = (
    "| {layout} | {flower_s:.3f} s | {ours_s:.3f} s | {speedup:.1f}x ({speedup_least:.1f} to "
    "{speedup_most:.1f}) | {ours_mb:.1f} of {flower_mb:.1f} MB ({share:.0%}) | "
    "{largest_difference:.1e} | {flower_int} -> {ours_int} |\n"
)


def row(line: dict) -> str:
    mine, theirs = line["ours_extra_bytes"], line["flower_extra_bytes"]
    return ROW.format(
        **line,
        ours_mb=mine / 1e6,
        flower_mb=theirs / 1e6,
        share=mine / theirs,
        flower_int=line["integer_dtype"]["flower"],
        ours_int=line["integer_dtype"]["ours"],
    )


def main() -> None:
    text = (HERE / "results.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    facts = "{nodes} nodes x {megabytes:g} MB, median of {repeats}, one thread; ".format(**lines[0])
    versions = "flwr {flwr}, numpy {numpy}, Python {python}, {machine}.\n".format(**lines[0])
    report = HEAD + "".join(row(line) for line in lines) + "\n" + facts + versions
    (HERE / "report.md").write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
