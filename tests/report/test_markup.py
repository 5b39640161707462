from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_hetero.report.page import Html, element, table, void

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


class Reader(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts += data


@settings(deadline=None)
@given(texts, texts)
def test_no_text_is_read_as_html(content, attribute):
    page = Reader(element("p", content, Html("<br>"), title=attribute, class_="x"))
    assert page.texts == content
    assert page.tags == [("p", {"title": attribute, "class": "x"}), ("br", {})]


def test_tables_mark_figures_and_escape_cells():
    page = Reader(table(("a", "b"), [("<td>", "1")], numeric=[1]))
    assert [tag for tag, _ in page.tags] == [
        *("div", "table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td")
    ]
    assert page.tags[-1] == ("td", {"class": "number"})
    assert page.texts == "ab<td>1"


def test_void_elements_have_no_end():
    assert void("source", srcset="a", data_x=1) == '<source srcset="a" data-x="1">'
