"""The page against a real server and a tiny model."""

import time

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.mlx, pytest.mark.xdist_group("browser")]
server = pytest.importorskip("tests.serve.conftest")
tiny, load_tiny = server.tiny, server.load_tiny  # fixtures
BatchGenerator = pytest.importorskip("mlx_lm.generate").BatchGenerator


@pytest.fixture
def real(_chromium, tiny):
    conftest = pytest.importorskip("tests.browser.conftest")
    with server.serving(tiny, context=20_000, max_tokens=24, api_key="sesame") as running:
        _chromium.get_log("browser")
        browser = conftest.Browser(_chromium, None)
        browser.driver.get(running.url)
        browser.until(lambda: browser.find("key").is_displayed())
        browser.find("key-value").send_keys("sesame\n")
        browser.until(lambda: browser.text("state") == "ok")
        yield browser, running
        assert browser.complaints() == []
        _chromium.get("about:blank")


def count(browser, field):
    return int(browser.field(field).replace(",", ""))


def test_a_chat_is_answered_and_seen_in_the_statistics(real):
    browser, running = real
    assert browser.text("smaller-text") == "nothing is held"
    browser.ask("What is the sea?")
    assert "24 tokens" in browser.turns()[1]
    browser.until(lambda: count(browser, "requests.outcomes.answered") == 1)
    browser.until(lambda: count(browser, "memory.prefixes.sequences") > 0)
    assert count(browser, "decode.tokens") == 24
    assert browser.text("smaller") == "2.56\u00d7"
    browser.ask("And again?")
    browser.until(lambda: count(browser, "prefixes.memory.requests") == 1)
    found = running.http.get("/v1/kvstow/stats", headers={"authorization": "Bearer sesame"}).json()
    assert count(browser, "prefixes.memory.tokens") == found["prefixes"]["memory"]["tokens"] > 10
    assert f"{found['prefixes']['memory']['tokens']} of them found again" in browser.turns()[3]


def test_an_answer_that_is_stopped_leaves_the_engine(real, monkeypatch):
    browser, running = real
    step = BatchGenerator.next

    def slow_step(self):
        time.sleep(0.03)
        return step(self)

    monkeypatch.setattr(BatchGenerator, "next", slow_step)
    browser.find("settings").click()
    browser.find("max-tokens").send_keys("15000")
    browser.ask("Go on and on.", ends=False)
    browser.until(lambda: count(browser, "work.decoding") == 1)
    browser.find("stop").click()
    server.until(running.is_idle)
    browser.until(lambda: count(browser, "requests.outcomes.disconnected") == 1)
    browser.until(lambda: count(browser, "memory.in_flight.sequences") == 0)


def test_what_the_server_refuses_is_shown_in_its_words(real):
    browser, _ = real
    browser.find("settings").click()
    browser.find("max-tokens").send_keys("30000")
    browser.ask("Too much.")
    said = browser.all("#log [role='alert']")[0].text
    assert said.startswith("the model's context is 20000 tokens, got ")
    browser.until(lambda: "context length exceeded" in browser.text("reasons"))
