"""Apply a unified diff to a copy of an app; no tool beside Python is needed."""

from pathlib import Path


def changed_lines(diff: str, *, server: bool = True) -> int:
    """Count lines that are new or replaced: those with a plus; or of the node only."""
    own = [lines for name, lines in changes(diff).items() if server or "server_app" not in name]
    return sum(line.startswith("+") for lines in own for line in lines)


def changes(diff: str) -> dict[str, list[str]]:
    """Return by file the lines with a plus or a minus, without their indentation."""
    files = {}
    name = ""
    for line in diff.splitlines():
        if line.startswith(("--- ", "+++ ")):
            name = line[4:].partition("/")[2]
        elif line.startswith(("+", "-")):
            files.setdefault(name, []).append(line[0] + line[1:].strip())
    return files


def apply(diff: str, folder: Path) -> None:
    """Change the files below ``folder``; what the diff takes out must be there, once."""
    for part in ("\n" + diff).split("\n--- ")[1:]:
        _, target, *lines = part.splitlines()
        path = folder / target.removeprefix("+++ b/")
        text = path.read_text(encoding="utf-8")
        for hunk in "\n".join(lines).split("\n@@ "):
            body = hunk.splitlines()[1:]
            old = "".join(line[1:] + "\n" for line in body if not line.startswith("+"))
            new = "".join(line[1:] + "\n" for line in body if not line.startswith("-"))
            assert text.count(old) == 1, f"{target}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
