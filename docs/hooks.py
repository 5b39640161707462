"""What mkdocs does not do: pages from where they stand, notebooks, the API, formulas as MathML."""

import json
import re
from importlib import import_module
from pathlib import Path
from posixpath import dirname, normpath, relpath
from textwrap import fill

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/*.md",
    "flwr_hetero/*/README.md",
    "flwr_hetero_studies/**/*.md",
)
"""Pages beside those in docs, and the pictures next to them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
NARROW = """
.pdoc .attr, .pdoc .docstring, .pdoc .bases { overflow-x: auto; overflow-wrap: anywhere; }
.pdoc h1, .pdoc dt { overflow-wrap: anywhere; }
"""
"""Style of the reference on a phone: what is too wide scrolls by itself."""
CODE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    """Add the pages and pictures that stand elsewhere in the repository."""
    found = {"index.md": ROOT / "README.md"}
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            found[path.relative_to(ROOT).as_posix()] = path
            found |= {p.relative_to(ROOT).as_posix(): p for p in path.parent.glob("*.png")}
    for name, path in found.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in (ROOT / "docs").glob("*.ipynb"):
        files.append(File.generated(config, f"{path.stem}.md", content=page_of(path)))
    return files


def page_of(notebook):
    """Write a notebook as a page: texts, code, and what the code printed or drew."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text, is_code = "".join(cell["source"]), cell["cell_type"] == "code"
        parts.append(f"```python\n{text}\n```" if is_code else text)
        for output in cell.get("outputs", ()):
            if "text" in output:
                lines = "".join(output["text"]).rstrip().splitlines()
                parts.append("```text\n" + "\n".join(fill(line, 90) for line in lines) + "\n```")
            else:
                parts.append(f"![](data:image/png;base64,{output['data']['image/png'].strip()})")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown, page, config, files):
    """Let links lead to pages of the site; those to other files of the repository stay as text."""
    made = f"docs/{page.file.src_uri}"  # of a notebook
    source = Path(page.file.abs_src_path or ROOT / made).relative_to(ROOT).as_posix()

    def link(match):
        picture, text, target, anchor = match.groups(default="")
        if not target or ":" in target:
            return match[0]
        wanted = normpath(f"{dirname(source)}/{target}") if dirname(source) else normpath(target)
        for name in (wanted.replace(".ipynb", ".md"), f"{wanted}/README.md"):
            name = name.removeprefix("docs/").replace("README.md", "index.md", name == "README.md")
            if files.get_file_from_path(name):
                where = relpath(name, dirname(page.file.src_uri) or ".")
                return f"{picture}[{text}]({where}{anchor})"
        if not (ROOT / wanted).exists():
            raise ValueError(f"{source}: {target} leads nowhere")
        return text

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html, page, config, files):
    """Render formulas."""
    spans = r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>'
    return re.sub(spans, lambda found: mathml(found[3], found[2] == "["), html, flags=re.DOTALL)


def on_post_build(config):
    """Write the API reference beside the pages."""
    folder = Path(config.site_dir) / "api"
    import_module("pdoc.render").configure(docformat="numpy", show_source=False, search=False)
    import_module("pdoc").pdoc("flwr_hetero", "flwr_hetero_studies.tasks", output_directory=folder)
    for path in folder.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\$\$(.+?)\$\$", lambda m: mathml(m[1], block=True), text, flags=re.DOTALL)
        text = text.replace("</head>", f"<style>{NARROW}</style></head>", 1)
        path.write_text(text, encoding="utf-8")


def mathml(formula, block):
    """Convert a formula; browsers draw it without a script."""
    plain = formula.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    return convert(re.sub(r"</?em>", "_", plain).strip(), display="block" if block else "inline")
