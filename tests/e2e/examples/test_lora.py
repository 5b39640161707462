"""LoRA: what nodes return is trained, the rest keeps its value; by hand, and with PEFT."""

import logging
import re
from pathlib import Path

import pytest
import torch
from dropin.patching import changes
from e2e.examples.running import HERE, App, run
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from recording import History
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.strategy import Compressed, FedSlice

FLEET = [DeviceProfile(speed) for speed in (4.0, 2.0, 1.0, 0.25)]

# --- by hand -----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with adapters of rank 2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(32, 16).requires_grad_(False)
        self.lora_a = nn.Linear(32, 16, bias=False)
        self.lora_b = nn.Linear(16, 16, bias=False)

    def forward(self, inputs):
        return self.base(inputs) + self.lora_b(self.lora_a(inputs))


app = ClientApp(mods=[hetero])


@app.train()
def train(msg, context):
    """Train the adapters, and return them alone."""
    model = Adapted()
    partition = context.node_config["partition-id"]
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(partition))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for (batch,) in hetero.batches(DataLoader(TensorDataset(inputs), 8, shuffle=True), msg):
        optimizer.zero_grad()
        loss = (model(batch) - batch[:, :16]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    arrays = ArrayRecord({k: v for k, v in model.state_dict().items() if "lora" in k})
    metrics = {"num-examples": 64, "train-loss": sum(losses) / len(losses)}
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=msg)


def test_adapters_by_hand(caplog):
    """Other strategies than these two: tests/conformance/test_parts.py, with another app."""
    caplog.set_level(logging.INFO, "flwr")
    history = History(Compressed(FedSlice()))
    before = Adapted().state_dict()
    history.leaf.fraction_evaluate = 0.0
    result = history.start(LocalGrid(app, FLEET), ArrayRecord(before), num_rounds=8)
    after = result.arrays.to_torch_state_dict()
    assert list(after) == list(before)
    for key in before:
        assert torch.equal(before[key], after[key]) == ("base" in key)
    assert not any(record["failures"] for record in history.records)
    losses = [record["train"]["train-loss"] for record in history.records[1:]]
    assert losses[-1] < 0.8 * losses[0]
    said = [r.message for r in caplog.records if "are not returned" in r.message]
    assert said == [
        "2 of 4 arrays are not returned by nodes and keep their value: base.bias, base.weight"
    ]


# --- with PEFT -----------------------------------------------------------------------------------

ADAPTERS = "get_peft_model_state_dict(task.make_model())"
APP = App(
    "PEFT", HERE / "lora", "lora_app", ("peft", "transformers", "sklearn"), ADAPTERS,
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
