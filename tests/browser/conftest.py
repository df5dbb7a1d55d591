"""Headless Chromium, and a server for it."""

import os
import shutil
from dataclasses import replace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
webdriver = pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

from tests.browser.site import STATS, Site, serving  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It may not ask its makers for anything, and in a container it runs as root.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,900",
)


def _programs():
    """Chromium and its driver.

    Skips where one is missing, unless KVSTOW_REQUIRE_BROWSER is set.
    """
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if chromium and driver:
        return chromium, driver
    missing = ", no ".join(
        name for name, found in (("Chromium", chromium), ("chromedriver", driver)) if not found
    )
    why = f"no {missing} (on Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("KVSTOW_REQUIRE_BROWSER") == "1":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory):
    chromium, program = _programs()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(program))
    yield driver
    driver.quit()


class Browser:
    """A tab of the page, and short words for what tests do there."""

    def __init__(self, driver, site):
        self.driver, self.site = driver, site

    def open(self, **changes):
        """Load the page anew, with other statistics."""
        self.site.stats = replace(STATS, **changes)
        self.driver.get(self.site.url)
        self.until(lambda: self.text("state") != "connecting")

    def find(self, id):
        return self.driver.find_element(By.ID, id)

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, id):
        return self.find(id).text

    def field(self, name):
        """The text of the first element that shows a field of the statistics."""
        return self.all(f"[data-field='{name}']:not(svg)")[0].text

    def script(self, code, *args):
        return self.driver.execute_script(code, *args)

    def until(self, condition, seconds=10):
        return WebDriverWait(self.driver, seconds, 0.03).until(lambda _: condition())

    def ask(self, question, *, ends=True):
        """Write a question and press Enter; wait for the end of the answer."""
        self.find("question").send_keys(question + "\n")
        if ends:
            self.until(lambda: self.find("send").is_displayed())

    def turns(self):
        return [turn.text for turn in self.all("#log > .turn")]

    def emulate(self, command, **options):
        self.driver.execute_cdp_cmd(f"Emulation.{command}", options)

    def complaints(self):
        """What the console says, without answers of the server that are errors."""
        return [m["message"] for m in self.driver.get_log("browser") if m["source"] != "network"]


@pytest.fixture
def site():
    it = Site()
    with serving(it.app()) as it.url:
        yield it


@pytest.fixture
def browser(_chromium, site):
    """The page of `site`, which nothing may have gone wrong on."""
    _chromium.get_log("browser")
    it = Browser(_chromium, site)
    it.open()
    yield it
    assert it.complaints() == []
    it.emulate("clearDeviceMetricsOverride")
    it.emulate("setEmulatedMedia", features=[])
    _chromium.get("about:blank")
