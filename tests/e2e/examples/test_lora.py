"""LoRA with PEFT: what nodes return is trained, and the rest keeps its value.

Other apps whose nodes return a part of the arrays are in tests/conformance/test_parts.py.
"""

import logging
import re
from pathlib import Path

import pytest
from dropin.patching import changes
from e2e.examples.running import HERE, App, run

from flwr_hetero.fleet import DeviceProfile

ADAPTERS = "get_peft_model_state_dict(task.make_model())"
APP = App(
    "PEFT", HERE / "lora", "lora_app", ("peft", "transformers", "sklearn"), ADAPTERS,
    strategy="FedAvg()",
    taken="from peft import get_peft_model_state_dict\n\nfrom {package} import task",
)  # fmt: skip
LINES, WHOLE = (
    (HERE / "halves" / "lora" / f"{name}.diff").read_text(encoding="utf-8")
    for name in ("compressed", "whole")
)
PAGE = (Path(__file__).parents[3] / "docs" / "lora.md").read_text(encoding="utf-8")
CPUS = (4, 4, 2, 2, 1, 1, 0.5, 0.5, 0.25, 0.25)
ROUNDS = 8


def lines_for(strategy):
    """Return the page's lines with another strategy."""
    found = LINES.replace("Compressed(FedSlice())", strategy)
    return found.replace("import Compressed, FedSlice", "import Compressed, FedSlice, Wrapper")


def go(folder, diff, cpus=CPUS, rounds=ROUNDS, num_digits=1797):
    """Run the app with the lines of a diff."""
    for package in APP.needs:
        pytest.importorskip(package)
    fleet = [DeviceProfile(cpu) for cpu in cpus]
    return run(APP, folder, rounds=rounds, fleet=fleet, num_digits=num_digits, diff=diff)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", ["", WHOLE], ids=["adapters", "whole"])
def test_adapters_of_peft(more, tmp_path, caplog):
    caplog.set_level(logging.INFO, "flwr")
    seen = go(tmp_path, LINES + more, CPUS[::3], 4, 1000)
    assert not any(record["failures"] for record in seen.records)
    found = [record["evaluate"]["eval_acc"] for record in seen.records[2:]]
    assert found[-1] > max(0.5, found[0])
    said = [r.message for r in caplog.records if "are not returned" in r.message]
    assert [text[:8] for text in said] == (["40 of 66"] if more else [])
    # what is packed is less than an eighth of 32 bits each way, but for the first model and scales
    assert seen.records[-1]["bytes_up"] < 0.5 * seen.records[-1]["bytes_down"] or not more


def test_lines_of_the_page_are_those_of_the_app():
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
    (shown,) = changes(block).values()
    assert shown == [line for lines in changes(LINES).values() for line in lines]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_figures_of_the_page(tmp_path):
    rows = re.findall(r"^\| `(.+?)`(, whole model)? \| (.+) % \| (.+) \| (.+) \|$", PAGE, re.M)
    assert len(rows) == 4
    for number, (strategy, whole, *figures) in enumerate(rows):
        diff = lines_for(strategy.replace("FedAvg()", "Wrapper()")) + (WHOLE if whole else "")
        records = go(tmp_path / str(number), diff).records
        total = sum(record["bytes_down"] + record["bytes_up"] for record in records) / 1e6
        accuracy = 100 * records[-1]["evaluate"]["eval_acc"]
        found = [accuracy, records[-1]["virtual_s"], total]
        assert [*map(float, figures)] == pytest.approx(found, rel=0.1), strategy
