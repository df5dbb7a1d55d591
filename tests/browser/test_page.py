"""The page, as a browser shows it and a person uses it."""

import time
from dataclasses import replace

import pytest

by = pytest.importorskip("selenium.webdriver.common.by")
keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
stats = pytest.importorskip("kvstow.serve.stats")
site_module = pytest.importorskip("tests.browser.site")
STATS = site_module.STATS

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
TIMES = "\u00d7"
MARKUP = '<img src="x" onerror="window.harmed = 1"><script>window.harmed = 1</script>'


def test_it_shows_what_the_server_holds(browser):
    assert browser.driver.title == "smollm2 · kvstow"
    assert browser.field("scheme") == "turbo:k8v3"
    assert browser.text("state") == "ok"
    assert browser.text("uptime") == "up 1 h 6 min"
    assert browser.text("smaller") == f"2.56{TIMES}"
    assert browser.field("memory.held.kv_bytes") == "98.0 MB"
    assert browser.field("memory.held.kv_bytes_bf16") == "251 MB"
    assert browser.field("memory.in_flight.tokens") == "6,144"
    assert browser.field("prefixes.disk.tokens") == "4,096"
    assert browser.field("decode.per_s") == "9.6"
    assert browser.field("work.decoding") == "2"
    assert browser.text("reasons").splitlines() == [
        "queue full",
        "2",
        "context length exceeded",
        "1",
    ]


def test_the_bars_are_as_long_as_the_bytes_are_many(browser):
    def width(id):
        return browser.find(id).size["width"]

    browser.until(lambda: width("bar-bf16") > 0)
    browser.script(
        "for (const i of document.querySelectorAll('.bar i')) i.style.transition = 'none'"
    )
    whole = width("bar-bf16")
    held = STATS.memory
    assert width("bar-in-flight") / whole == pytest.approx(58.8 / 250.8, abs=0.01)
    assert width("bar-kept") / whole == pytest.approx(39.2 / 250.8, abs=0.01)
    assert width("bar-budget") / whole == pytest.approx(0.3 / 2, abs=0.01)
    assert held.held.kv_bytes == 98_000_000


def test_nothing_held_is_said_so(browser):
    browser.open(memory=stats.Memory())
    assert browser.text("smaller-text") == "nothing is held"


def test_a_cache_larger_than_bf16_is_not_called_smaller(browser):
    browser.open(memory=stats.Memory(stats.Held(1, 10, 200, 100)))
    assert (browser.text("smaller"), browser.text("smaller-text")[:6]) == (f"2.00{TIMES}", "larger")


def test_numbers_change_while_it_is_open(browser):
    browser.site.stats = replace(STATS, decode=replace(STATS.decode, per_s=123.4, tokens=5000))
    browser.until(lambda: browser.field("decode.per_s") == "123")
    assert browser.field("decode.tokens") == "5,000"
    assert browser.all("svg[data-field='decode.per_s'] .line")[0].get_attribute("d").count("L") >= 1


def test_old_numbers_are_said_to_be_old(browser):
    assert not browser.find("age").is_displayed()
    browser.open(measured_s_ago=12.0)
    assert browser.text("age").startswith("as it was 12.0 s ago")


def test_layers_are_listed_on_demand(browser):
    assert not browser.find("layers-rows").is_displayed()
    assert browser.text("layers-summary") == "29 of 30 quantised; attention 29 deferred, 1 host"
    browser.find("layers-each").click()
    rows = browser.all("#layers-rows tr")
    assert len(rows) == 30
    assert rows[0].text == "0 full turbo:k8v3 deferred"
    assert rows[29].text == "29 other off host recurrent layer has a state, not keys and values"


def test_kernels_and_what_took_the_calls_are_listed(browser):
    failed = stats.KernelStats("attend_k8v3", passed=False, why="wrong by 0.5")
    browser.open(kernels=(failed,), attention_calls={"kernel": 12, "more than 8 query tokens": 3})
    assert browser.text("kernels").splitlines() == ["attend_k8v3", "wrong by 0.5"]
    assert browser.text("attention-calls").splitlines()[:2] == ["attention: kernel", "12"]


def test_it_asks_nobody_while_it_is_hidden(browser):
    driver = browser.driver
    page = driver.current_window_handle
    driver.switch_to.new_window("tab")
    browser.until(lambda: True)
    driver.switch_to.window(page)
    driver.switch_to.new_window("tab")
    try:
        driver.execute_script("return new Promise(done => setTimeout(done, 300))")
        before = browser.site.polls
        driver.execute_script("return new Promise(done => setTimeout(done, 1500))")
        assert browser.site.polls == before
    finally:
        for handle in driver.window_handles:
            driver.switch_to.window(handle)
            if handle != page:
                driver.close()
        driver.switch_to.window(page)
    browser.until(lambda: browser.site.polls > before)


def test_a_server_that_is_gone_is_said_to_be_gone(browser):
    driver = browser.driver
    driver.execute_cdp_cmd("Network.enable", {})
    try:
        _emulate_network(driver, offline=True)
        browser.until(lambda: browser.text("state") == "the server does not answer")
        assert "stale" in browser.find("stats").get_attribute("class")
        _emulate_network(driver, offline=False)
        browser.until(lambda: browser.text("state") == "ok")
    finally:
        _emulate_network(driver, offline=False)


def _emulate_network(driver, *, offline):
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )


def test_everything_comes_from_the_server_itself(browser):
    loaded = browser.script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert len(loaded) >= 6
    assert all(name.startswith(browser.site.url) for name in loaded)


def test_the_browser_would_load_nothing_from_elsewhere(browser):
    # The console complains of each; the fixture would fail.
    blocked = browser.script("""
        const blocked = [];
        document.addEventListener("securitypolicyviolation",
          (e) => blocked.push(e.effectiveDirective));
        const image = document.body.appendChild(new Image());
        image.src = "http://127.0.0.2/x.png";
        const script = document.createElement("script");
        try { script.text = "window.harmed = 1"; } catch { blocked.push("trusted-types"); }
        document.body.append(script);
        return fetch("http://127.0.0.2/").catch(() => 0)
          .then(() => new Promise(done => setTimeout(() => done(blocked), 100)));
    """)
    assert {"img-src", "connect-src", "trusted-types"} <= set(blocked)
    assert browser.script("return window.harmed") is None
    assert browser.complaints()


def test_an_answer_is_streamed(browser):
    browser.site.chunks, browser.site.pause_s = ["One", " two", " three."], 0.3
    browser.ask("Count.", ends=False)
    browser.until(lambda: browser.turns()[1:] and browser.turns()[1].startswith("One"))
    assert "three" not in browser.turns()[1]
    browser.until(lambda: browser.find("send").is_displayed())
    question, answer = browser.turns()
    assert question == "Count."
    assert answer.splitlines()[0] == "One two three."
    assert "7 tokens" in answer
    assert "prompt 20 tokens, 16 of them found again" in answer


def test_a_later_question_comes_with_what_was_said(browser):
    browser.ask("First?")
    browser.ask("Second?")
    said = [(m["role"], m["content"]) for m in browser.site.asked[1]["messages"]]
    assert said == [
        ("user", "First?"),
        ("assistant", "The sea is blue."),
        ("user", "Second?"),
    ]
    browser.find("fresh").click()
    assert browser.turns() == []
    browser.ask("Third?")
    assert len(browser.site.asked[2]["messages"]) == 1


def test_settings_are_sent_where_they_are_set(browser):
    browser.ask("Without?")
    assert set(browser.site.asked[0]) == {"messages", "stream", "stream_options"}
    browser.find("settings").click()
    browser.find("max-tokens").send_keys("12")
    browser.find("temperature").send_keys("0.5")
    browser.ask("With?")
    sent = browser.site.asked[1]
    assert (sent["max_tokens"], sent["temperature"]) == (12, 0.5)


def test_reasoning_is_shown_apart_and_not_sent_back(browser):
    browser.site.chunks = [{"reasoning": "Hm."}, "Yes."]
    browser.ask("Is it?")
    assert [e.text for e in browser.all(".thought")] == ["", "Hm."]
    browser.ask("Sure?")
    assert browser.site.asked[1]["messages"][1]["content"] == "Yes."


def test_markup_is_text_wherever_it_comes_from(browser):
    layer = replace(STATS.layers[0], reason=MARKUP)
    requests = replace(STATS.requests, refused={MARKUP: 1})
    browser.open(model=MARKUP, scheme=MARKUP, layers=(layer,), requests=requests)
    browser.site.chunks = [MARKUP, {"reasoning": MARKUP}]
    browser.ask(MARKUP)
    browser.site.refusal = 400, MARKUP
    browser.ask("again")
    assert MARKUP in browser.turns()[1]
    assert MARKUP in browser.turns()[3]
    assert browser.field("model") == MARKUP
    assert browser.all("img") == []
    assert browser.script("return window.harmed") is None


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_can_be_stopped_and_the_server_learns_of_it(browser, how):
    browser.site.chunks, browser.site.pause_s = ["word "] * 500, 0.02
    browser.ask("Go on.", ends=False)
    browser.until(lambda: "word word" in browser.turns()[1])
    if how == "button":
        browser.find("stop").click()
    else:
        browser.find("question").send_keys(keys.ESCAPE)
    browser.until(lambda: browser.find("send").is_displayed())
    assert browser.turns()[1].endswith("stopped")
    assert browser.site.left.wait(10)
    browser.site.chunks = ["Fine."]
    browser.ask("And now?")
    assert browser.turns()[-1].startswith("Fine.")


def test_a_refusal_is_shown_as_the_server_says_it(browser):
    browser.site.refusal = 429, "the queue is full: 64 requests wait", {"Retry-After": "7"}
    browser.ask("Now?")
    error = browser.all("#log [role='alert']")[0].text
    assert error == "the queue is full: 64 requests wait (try again in 7 s)"
    assert browser.find("question").get_property("value") == "Now?"
    browser.site.refusal = None
    browser.find("question").clear()
    browser.ask("Then?")
    assert len(browser.site.asked[1]["messages"]) == 1


def test_an_error_in_the_middle_of_an_answer_is_shown_below_it(browser):
    browser.site.chunks = ["Half", {"error": {"message": "generation failed: no memory"}}]
    browser.ask("Go on.")
    assert browser.turns()[1].splitlines() == ["Half", "generation failed: no memory"]


def test_a_key_is_asked_for_and_kept_in_the_page_alone(browser):
    browser.site.key = "open sesame"
    browser.open()
    browser.until(lambda: browser.find("key").is_displayed())
    assert browser.text("state") == "needs an API key"
    assert browser.driver.switch_to.active_element == browser.find("key-value")
    browser.find("key-value").send_keys("open sesame\n")
    browser.until(lambda: browser.text("state") == "ok")
    assert not browser.find("key").is_displayed()
    browser.ask("Hello?")
    assert browser.turns()[1].startswith("The sea is blue.")
    kept = browser.script(
        "return JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        " + document.documentElement.outerHTML + document.getElementById('key-value').value"
    )
    assert "sesame" not in kept


def test_a_wrong_key_is_asked_for_again(browser):
    browser.site.key = "open sesame"
    browser.open()
    browser.until(lambda: browser.find("key").is_displayed())
    assert not browser.find("key-wrong").is_displayed()
    browser.find("key-value").send_keys("open barley\n")
    browser.until(lambda: browser.find("key-wrong").is_displayed())
    assert browser.find("key-value").get_property("value") == ""


def test_nothing_is_asked_while_a_key_is_waited_for(browser):
    browser.site.key = "open sesame"
    browser.open()
    browser.until(lambda: browser.find("key").is_displayed())
    before = browser.site.n_without_key
    time.sleep(1.2)  # there is a poll every second
    assert browser.site.n_without_key == before


def test_the_keyboard_is_enough(browser):
    def focused():
        return browser.driver.switch_to.active_element.get_attribute("id")

    browser.script("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        browser.driver.switch_to.active_element.send_keys(keys.TAB)
        reached.append(focused())
    assert reached.index("fresh") < reached.index("question") < reached.index("send")
    browser.find("question").send_keys("two", keys.SHIFT + keys.ENTER, keys.NULL, "lines")
    assert browser.site.asked == []
    browser.find("send").send_keys(keys.ENTER)
    browser.until(lambda: browser.site.asked)
    assert browser.site.asked[0]["messages"][0]["content"] == "two\nlines"
    browser.until(lambda: browser.find("send").is_displayed())
    assert focused() == "question"


def test_every_control_has_a_name(browser):
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = [
        n
        for n in nodes
        if n.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "link")
    ]
    assert len(controls) >= 5
    assert [n for n in controls if not n.get("name", {}).get("value")] == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_a_narrow_screen(browser, width):
    browser.emulate(
        "setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True
    )
    browser.open()
    browser.ask("W" * 200)
    browser.find("layers-each").click()
    assert browser.script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser, theme):
    browser.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.site.refusal = 400, "no"
    browser.ask("x")
    colours = {
        css: browser.script(
            "const s = getComputedStyle(document.querySelector(arguments[0]));"
            "return [s.color, getComputedStyle(document.body).backgroundColor]",
            css,
        )
        for css in ("body", ".note", ".error", "a", "h2", "#fresh")
    }
    contrasts = {css: contrast(*pair) for css, pair in colours.items()}
    assert {css: c for css, c in contrasts.items() if c < 4.5} == {}
    is_dark = luminance(colours["body"][1]) < 0.2
    assert is_dark == (theme == "dark")


def luminance(colour):
    """Relative luminance of ``rgb(r, g, b)``, by WCAG."""
    channels = [int(c) / 255 for c in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
