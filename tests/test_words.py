"""Pages, docstrings, log lines and errors are in plain words, and pages in short sentences."""

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "docs/*.md", "deploy/*.md", "apps/*/README.md", "flwr_hetero/*/README.md")
PAGES = sorted(p for each in PATTERNS for p in ROOT.glob(each) if p.name != "SECURITY.md")
MODULES = sorted((ROOT / "flwr_hetero").rglob("*.py"))
STOP = re.compile(
    r"\b(?:roster|wardens?|cure[sd]?|at work|merge[sd]?|merging|told|foret\w+|heard of|spoke|whom"
    r"|(?:kept|keeps?) silent|left alone|(?:come|came)s? back|afresh|anew|learnt|likewise|whilst"
    r"|takes? down|thereby|hitherto|henceforth|wherein"
    r"|(?:node|server|client|their)(?:'s|s')? half)\b",
    re.IGNORECASE,
)
"""Literary words, and those for which the field has a term, such as in flight, server update."""
MOST_IN_ALL = 42_000
"""Words of all pages and reports together, outside code."""
MOST_WORDS, MOST_SEMICOLONS = 18, 0.02
"""Of a page: mean length of a sentence, share of sentences with a semicolon."""


def found_in(text: str) -> list[str]:
    return [
        " ".join(text[max(0, m.start() - 30) : m.end() + 30].split()) for m in STOP.finditer(text)
    ]


def sentences(page: Path) -> list[str]:
    """Return the sentences outside code, tables, headings, quotes and lists of links."""
    text = re.sub(r"```.*?```", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    skipped = ("|", "#", "!", "<", "- [", "[!")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(skipped)]
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n", " \n".join(lines))
    return [part for part in parts if len(part.split()) >= 4]


def faults_of(page: Path) -> list[str]:
    """Return what a page has that it should not have."""
    parts = sentences(page)
    faults = found_in(re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8")))
    if (words := sum(len(part.split()) for part in parts)) > MOST_WORDS * len(parts):
        faults.append(f"{words / len(parts):.1f} words a sentence")
    if (share := sum(";" in part for part in parts)) > MOST_SEMICOLONS * len(parts):
        faults.append(f"semicolons in {share} of {len(parts)} sentences")
    return faults


def test_pages_are_in_plain_words():
    assert len(PAGES) > 25
    assert not {str(page.relative_to(ROOT)): f for page in PAGES if (f := faults_of(page))}
    cells = json.loads((ROOT / "docs/fleet.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert not [hit for text in texts for hit in found_in(text)]


def test_all_pages_together_can_be_read():
    pages = {*PAGES, ROOT / "SECURITY.md", *(ROOT / "flwr_hetero_studies").rglob("*.md")}
    texts = [re.sub(r"```.*?```", " ", page.read_text("utf-8"), flags=re.DOTALL) for page in pages]
    assert sum(len(text.split()) for text in texts) <= MOST_IN_ALL


def test_docstrings_log_lines_and_errors_are_in_plain_words():
    hits = {}
    for module in MODULES:
        tree = ast.parse(module.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        texts = [node.value for node in nodes if isinstance(node.value, str) and " " in node.value]
        if found := [hit for text in texts for hit in found_in(re.sub(r"`[^`]*`", "", text))]:
            hits[str(module.relative_to(ROOT))] = found
    assert not hits


def test_the_check_finds_what_it_should():
    assert found_in("Nodes at work are told afresh whom to ask.")
    assert not found_in("It went well.")
    assert STOP.search("merged")
    assert not STOP.search("emerge")
