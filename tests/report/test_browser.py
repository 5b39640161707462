"""Pages in a real browser: no error, charts drawn, readable and usable everywhere.

Needs Chromium and its driver (Debian: ``chromium chromium-driver``).
"""

import json
import shutil

import pytest

from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import write_page
from flwr_hetero.report.page import run_data, write_report
from flwr_hetero.report.page import write_page as page_of

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or no chromedriver on PATH"),
]
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
WAIT_S = 120
ROOT = "document.documentElement"
FITS = f"return {ROOT}.scrollWidth <= {ROOT}.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def look(browser, address, width=1200, scheme="light"):
    """Open a page, wait until it is drawn, and check that there was no error."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address if "://" in str(address) else f"file://{address}")
    ready = "return document.body.dataset.ready === 'yes'"
    WebDriverWait(browser, WAIT_S).until(lambda driver: driver.execute_script(ready))
    assert [line for line in browser.get_log("browser") if line["level"] != "INFO"] == []
    assert browser.execute_script(FITS)


def count_drawn(browser):
    """Return how many charts the page wants, and how many show a line, a bar or a dot."""
    return browser.execute_script("""
      const plots = [...document.querySelectorAll('.plot')];
      const shapes = '.js-line, .point, .fills path, .js-fill';
      return [plots.length, plots.filter((plot) => plot.querySelector(shapes)).length];""")


@pytest.fixture
def run_page(make_run, rounds_of):
    return write_report(make_run("run", rounds_of(60), {"settings": {"policy": "adaptive"}}))


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_of_a_run(browser, run_page, width, scheme):
    look(browser, run_page, width, scheme)
    wanted, drawn = count_drawn(browser)
    assert wanted == drawn == 3


@pytest.fixture
def comparison_page(make_run, rising, tmp_path):
    """Write the page of a baseline, a run with rounds a fifth as long, and a bad one."""
    folders = []
    for policy, round_s, best in ("vanilla", 10.0, 1.0), ("fast", 2.0, 1.0), ("slow", 2.0, 0.5):
        rounds = rising(round_s, [best * value for value in rising.values])
        folders.append(make_run(policy, rounds, {"settings": {"policy": policy, "seed": 0}}))
    return write_page(compare(read_runs(folders)), tmp_path / "compare.html")


def test_keyboard_switches_sorts_and_filters(browser, comparison_page, run_page):
    def find(*wanted):
        return browser.find_elements(By.CSS_SELECTOR, *wanted)

    look(browser, comparison_page, 390)
    look(browser, comparison_page)
    assert count_drawn(browser) == [2, 2]
    assert [text.text[:11] for text in find(".verdict")] == ["fast is 5.0", "slow never "]
    assert len(find(".tall .js-line")) == 3
    find(".controls input[type=checkbox]")[1].send_keys(Keys.SPACE)  # 0: logarithmic
    assert len(find(".tall .js-line")) == 2
    find(".controls select")[1].send_keys(Keys.ARROW_DOWN)
    assert find(".tall .xtitle")[0].text == "rounds"
    table = find("section table")[-1]
    heads = table.find_elements(By.TAG_NAME, "button")
    heads[2].send_keys(Keys.ENTER)  # time to the target
    column = [row.text for row in table.find_elements(By.CSS_SELECTOR, "td:nth-child(3)")]
    assert column == ["18 s", "1 min 30 s", "never"]
    look(browser, run_page)
    rows = "section:has(input[aria-label='filter Nodes']) tbody tr:not([hidden])"
    assert len(find(rows)) == 20
    find("input[aria-label='filter Nodes']")[0].send_keys("node-12")
    [row] = find(rows)
    assert row.text.startswith("node-12")


def test_page_is_read_again(browser, make_run, rounds_of):
    folder = make_run("live", rounds_of(6))
    rounds = rounds_of(20)
    page = page_of(run_data(folder) | {"refresh": 1}, folder / "report.html")
    look(browser, page.as_uri())
    shown = "return [...document.querySelectorAll('.facts .value')].map((x) => x.textContent)"
    (folder / "history.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rounds))
    write_report(folder)
    WebDriverWait(browser, WAIT_S).until(lambda d: "20" in d.execute_script(shown))
