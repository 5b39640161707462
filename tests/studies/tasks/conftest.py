"""Modules with models of a user's own, and that of docs/data.md."""

import re
import sys
from pathlib import Path

import pytest

OWN = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(shape[0], num_classes, bias=False)
        self.again = nn.Linear(shape[0], num_classes, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("twos", torch.full((num_classes,), 2.0), persistent=False)

    def forward(self, x):
        return (self.first(x.flatten(1)) + self.again(x.flatten(1))) * self.twos


def too_wide(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], num_classes + 1))


def no_module(shape, num_classes):
    return torch.relu


"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Give the name of the user's module."""
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    texts = {"own": OWN, "broken": "import no_such_package", "page": block}
    for name, text in texts.items():
        (tmp_path / f"{name}_module.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_module"
    for name in texts:
        sys.modules.pop(f"{name}_module", None)
