"""What the README shows must run."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example_runs(number):
    exec(compile(BLOCKS[number], f"README.md, example {number + 1}", "exec"), {})


def test_there_are_examples():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_link_leads_somewhere(target):
    assert (Path(__file__).parents[1] / target).exists()
