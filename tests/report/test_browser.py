"""Pages in a real browser: no error, charts drawn, verdict right, readable and usable everywhere.

Needs Chromium and its driver (Debian: ``chromium chromium-driver``).
"""

import json
import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import write_page
from flwr_hetero.report.page import DATA, run_data, write_report

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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
    service = webdriver.ChromeService(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def look(browser, address, width=1200, scheme="light"):
    """Open a page as wide and as light as given, and wait until it is drawn."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address if "://" in str(address) else f"file://{address}")
    ready = "return document.body.dataset.ready === 'yes'"
    WebDriverWait(browser, WAIT_S).until(lambda driver: driver.execute_script(ready))
    if folder := os.environ.get("SCREENSHOTS"):
        name = f"{str(address).rsplit('/', 1)[-1]}-{width}-{scheme}.png"
        height = browser.execute_script("return document.documentElement.scrollHeight")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen | {"height": height})
        browser.save_screenshot(f"{folder}/{name}")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def count_drawn(browser):
    """Return how many charts the page wants, and how many show a line, a bar or a dot."""
    script = """
      const plots = [...document.querySelectorAll('.plot')];
      const shapes = '.js-line, .point, .fills path, .js-fill';
      return [plots.length, plots.filter((plot) => plot.querySelector(shapes)).length];"""
    return browser.execute_script(script)


@pytest.fixture
def run_page(make_run, rounds_of):
    chances = [0.4, 0.3, 0.2, 0.1, 0.0]
    rounds = rounds_of(60)
    for record in rounds[1:]:
        record["tifl"]["tier_chances"] = chances
    config = {"settings": {"policy": "adaptive", "seed": 0, "num-server-rounds": 60}}
    return write_report(make_run("run", rounds, config))


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_of_a_run(browser, run_page, width, scheme):
    look(browser, run_page, width, scheme)
    assert [line for line in browser.get_log("browser") if line["level"] != "INFO"] == []
    wanted, drawn = count_drawn(browser)
    assert wanted == drawn >= 12
    assert browser.execute_script(FITS)
    ratios = browser.execute_script(CONTRAST)
    assert len(ratios) > 50
    assert min(ratios) >= 4.5  # WCAG 2, level AA


CONTRAST = """
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const curved = (share) => ((share + 0.055) / 1.055) ** 2.4;
    const part = (value) => (value <= 10 ? value / 255 / 12.92 : curved(value / 255));
    const [r, g, b] = colour.slice(0, 3).map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll('p, h1, h2, td, th, label, select, summary, footer')];
  const seen = texts.filter((element) => element.textContent && element.offsetParent);
  const ticks = [...document.querySelectorAll('.plot text')];
  const pairs = [
    ...seen.map((element) => [getComputedStyle(element).color, element]),
    ...ticks.map((text) => [getComputedStyle(text).fill, text.closest('.card')]),
  ];
  return pairs.map(([colour, element]) => {
    const [a, b] = [light(numbers(colour)), light(ground(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });"""


RISE = [0.1 * i for i in range(9)] + [0.9] * 12


@pytest.fixture
def comparison_page(make_run, tmp_path):
    """Write the page of a baseline, a run of rounds a fifth as long, and one that fails."""
    runs = {"vanilla": (10.0, 1.0), "fast": (2.0, 1.0), "slow": (2.0, 0.5)}
    folders = []
    for policy, (round_s, best) in runs.items():
        rounds = [
            {"round": i, "virtual_s": round_s * i, "global": {"accuracy": best * value}}
            for i, value in enumerate(RISE)
        ]
        folders.append(make_run(policy, rounds, {"settings": {"policy": policy, "seed": 0}}))
    return write_page(compare(read_runs(folders)), tmp_path / "compare.html")


@pytest.mark.parametrize("width", [390, 1200])
def test_verdict_of_three_runs(browser, comparison_page, width):
    look(browser, comparison_page, width)
    assert [line for line in browser.get_log("browser") if line["level"] != "INFO"] == []
    said = [text.text for text in browser.find_elements(By.CSS_SELECTOR, ".verdict")]
    assert said[0].startswith("policy=fast reaches accuracy 89.0 % 5.0x sooner than policy=vanilla")
    assert said[1].startswith("policy=slow does not reach accuracy 89.0 %")
    assert count_drawn(browser) == [2, 2]
    assert browser.execute_script(FITS)


def test_keyboard_switches_sorts_and_filters(browser, comparison_page, run_page):
    def find(*wanted):
        return browser.find_elements(By.CSS_SELECTOR, *wanted)

    look(browser, comparison_page)
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
    heads[2].send_keys(Keys.ENTER)
    third = table.find_element(By.CSS_SELECTOR, "th:nth-child(3)")
    assert third.get_attribute("aria-sort") == "descending"
    look(browser, run_page)
    rows = "section:has(input[aria-label='filter Nodes']) tbody tr"
    assert len(find(rows)) == 20
    find("input[aria-label='filter Nodes']")[0].send_keys("node-12")
    [row] = find(rows)
    assert row.text.startswith("node-12")


def test_served_page_follows_the_run(browser, make_run, rounds_of, tmp_path):
    rounds = rounds_of(20)
    folder = make_run("live", rounds[:6])
    write_report(folder)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (folder / DATA).write_text(json.dumps(run_data(folder)))
        look(browser, f"http://127.0.0.1:{server.server_port}/report.html")
        shown = "return [...document.querySelectorAll('.facts .value')].map((x) => x.textContent)"
        assert "5" in browser.execute_script(shown)
        text = "".join(json.dumps(record) + "\n" for record in rounds)
        (folder / "history.jsonl").write_text(text)
        (folder / DATA).write_text(json.dumps(run_data(folder)))
        WebDriverWait(browser, WAIT_S).until(lambda d: "20" in d.execute_script(shown))
        assert count_drawn(browser)[0] == count_drawn(browser)[1]
    finally:
        server.shutdown()
        server.server_close()
