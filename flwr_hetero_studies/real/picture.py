"""The picture of the race on waiting nodes, for a narrow screen and for a dark one."""

from collections.abc import Mapping
from html import escape

WIDTH = 360
LEFT = 84
"""Place of the bars, right of the names."""
LONGEST = 200
ROW = 30
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1f2328}rect{fill:#8c959f}.ours{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#6e7681}.ours{fill:#4493f8}}"
)


def bars(seconds: Mapping[str, float], ours: str, title: str) -> str:
    """Draw a bar for each method, as long as its seconds; return an SVG.

    >>> bars({"FedAvg": 40.0, "FedSlice": 10.0}, "FedSlice", "Seconds").count("<rect")
    2
    """
    rows = []
    for place, (name, each_s) in enumerate(seconds.items()):
        top = ROW * (place + 1)
        length = LONGEST * each_s / max(seconds.values())
        look = ' class="ours"' if name == ours else ""
        rows.append(f'<text x="0" y="{top + 15}">{escape(name)}</text>')
        rows.append(
            f'<rect{look} x="{LEFT}" y="{top}" width="{length:.0f}" height="{ROW - 10}" rx="3"/>'
        )
        rows.append(f'<text x="{LEFT + length + 8:.0f}" y="{top + 15}">{each_s:.0f} s</text>')
    height = ROW * (len(seconds) + 1)
    said = ", ".join(f"{name} {each_s:.0f}" for name, each_s in seconds.items())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    label = f'aria-label="{escape(title)}: {escape(said)}"'
    begin = f"{head} {label}><style>{STYLE}</style>"
    return "\n".join([begin, f'<text x="0" y="16">{escape(title)}</text>', *rows, "</svg>\n"])
