"""HTML in which everything is escaped unless it was made here."""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already.

    Examples
    --------
    >>> element("p", "a < b", element("b", "bold"))
    '<p>a &lt; b<b>bold</b></p>'
    """

    __slots__ = ()


Content = str | Html
"""Plain text, which is escaped, or HTML."""


def element(tag: str, /, *content: Content, **attributes: str | int) -> Html:
    """Make an HTML element.

    Parameters
    ----------
    tag : str
        Its name.
    *content : str or Html
        What is in it; plain text is escaped.
    **attributes : str or int
        Escaped. A trailing underscore of a name is dropped, so that ``class_`` works; others
        become hyphens.

    Returns
    -------
    Html
        The element.

    Examples
    --------
    >>> element("td", "<script>", class_="number")
    '<td class="number">&lt;script&gt;</td>'
    """
    return Html(f"{void(tag, **attributes)}{join(content)}</{tag}>")


def void(tag: str, /, **attributes: str | int) -> Html:
    """Make an HTML element that has no content and no end.

    Parameters
    ----------
    tag : str
        Its name.
    **attributes : str or int
        As for :func:`element`.

    Returns
    -------
    Html
        The element.

    Examples
    --------
    >>> void("img", alt='"quoted"', http_equiv="x")
    '<img alt="&quot;quoted&quot;" http-equiv="x">'
    """
    names = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
    return Html(f"<{tag}" + "".join(f' {k}="{escape(v)}"' for k, v in names.items()) + ">")


def join(parts: Iterable[Content]) -> Html:
    """Put pieces after each other.

    Parameters
    ----------
    parts : iterable of str or Html
        Plain text is escaped.

    Returns
    -------
    Html
        All of them.
    """
    return Html("".join(p if isinstance(p, Html) else escape(str(p)) for p in parts))


def table(
    head: Sequence[str], rows: Iterable[Sequence[Content]], numeric: Iterable[int] = ()
) -> Html:
    """Make a table.

    Parameters
    ----------
    head : sequence of str
        Headings of the columns; empty for a table without.
    rows : iterable of sequence of str or Html
        The cells.
    numeric : iterable of int
        Columns that are set flush right.

    Returns
    -------
    Html
        In a box that scrolls sideways on small screens.
    """
    right = set(numeric)

    def row(name: str, cells: Sequence[Content]) -> Html:
        marked = [
            element(name, cell, class_="number") if column in right else element(name, cell)
            for column, cell in enumerate(cells)
        ]
        return element("tr", *marked)

    top = element("thead", row("th", head)) if head else Html()
    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("div", element("table", top, body), class_="scroll")
