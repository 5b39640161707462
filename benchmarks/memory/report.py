"""Turn ``results.jsonl`` into the table of ``report.md``; never runs anything."""

import json
from pathlib import Path

HERE = Path(__file__).parent

HEAD = """# Memory of a node

Processes of a real fleet with one SuperNode, on {machine}: Python {python}, Flower {flwr}, torch
{torch}, one thread. `python benchmarks/memory/run.py DATASET` (28 x 28 images); one run, the
highest figures seen. "Resident" counts shared libraries, "private" is what the process takes from
the others. What that means for each Jetson: [deploy/jetson.md](../../deploy/jetson.md#memory).

| process | resident MB | private MB | peak resident MB |
| --- | --- | --- | --- |
"""

ROW = "| {what} | {resident:,.0f} | {private:,.0f} | {peak:,.0f} |\n"


def main() -> None:
    lines = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    (HERE / "report.md").write_text(
        HEAD.format(**lines[0]) + "".join(ROW.format(**line) for line in lines), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
