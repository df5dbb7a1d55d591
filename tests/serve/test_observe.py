"""Page, statistics and metrics over HTTP, without a browser and without a model."""

import re
from dataclasses import replace
from importlib.resources import files

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
exposition = pytest.importorskip("prometheus_client.parser")

from starlette.applications import Starlette  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from kvstow.serve import observe, page  # noqa: E402
from kvstow.serve.stats import Stats  # noqa: E402
from tests.browser.site import STATS  # noqa: E402

# What Prometheus' naming rules ask for, by the type of a metric.
UNITS = ("_bytes", "_seconds", "_tokens", "_sequences", "_groups", "_passed", "_layers", "_state")
COUNTED = ("_running", "_waiting", "_info")


@pytest.fixture
def shown():
    return [STATS]


@pytest.fixture
def client(shown):
    with TestClient(Starlette(routes=observe.routes(lambda: shown[0]))) as client:
        yield client


@pytest.fixture
def scraped(client):
    return list(exposition.text_string_to_metric_families(client.get("/metrics").text))


def samples(families):
    return {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples}


def test_the_page_and_all_it_names_are_there(client):
    html = client.get("/").text
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', html)
    assert len(named) == 3
    modules = {
        "page/" + m
        for p in named
        if p.endswith(".js")
        for m in re.findall(r'from "\./([^"]+)"', client.get("/" + p).text)
    }
    assert modules
    for path in (*named, *modules):
        response = client.get("/" + path)
        assert response.status_code == 200, path
        assert response.headers["x-content-type-options"] == "nosniff"


def test_every_file_of_the_page_is_served_with_its_type():
    there = {f.name for f in files(page).iterdir() if not f.name.startswith("__")}
    assert there == set(page.TYPES)


def test_the_page_allows_nothing_from_elsewhere_and_nothing_inline(client):
    response = client.get("/")
    rules = dict(r.split(" ", 1) for r in response.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    allowed = {word for rule in rules.values() for word in rule.split()}
    assert allowed == {"'none'", "'self'", "'script'"}
    html = response.text
    assert re.findall(r"<script(?![^>]* src=)[^>]*>|<style| style=| on\w+=|https?://", html) == []


@pytest.mark.parametrize("name", [n for n in page.TYPES if n.endswith(".js")])
def test_no_script_makes_html_of_text(name):
    code = files(page).joinpath(name).read_text("utf-8")
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|Storage"
    assert re.findall(sinks, code) == []


def test_every_field_on_the_page_is_one_of_the_statistics(client):
    document = client.get("/v1/kvstow/stats").json()
    named = set(re.findall(r'data-field="([^"]+)"', client.get("/").text))
    assert len(named) > 25
    for name in named:
        value = document
        for part in name.split("."):
            assert part in value, name
            value = value[part]


def test_the_statistics_are_json_that_is_never_stored(client):
    response = client.get("/v1/kvstow/stats")
    assert response.headers["cache-control"] == "no-store"
    document = response.json()
    assert document["version"] == 1
    assert document["memory"]["held"] == {
        "sequences": 7,
        "tokens": 10_240,
        "kv_bytes": 98_000_000,
        "kv_bytes_bf16": 250_800_000,
        "compression_ratio": pytest.approx(2.559, abs=0.001),
    }
    assert document["layers"]["by_path"] == {"deferred": 29, "host": 1}
    assert document["layers"]["quantised"] == 29
    assert document["requests"]["first_token"]["count"] == 12


def test_before_the_model_is_loaded_everything_is_there_and_empty(client, shown):
    shown[0] = Stats("loading", 1.0, None, {}, "m", None, "off")
    document = client.get("/v1/kvstow/stats").json()
    assert document["layers"]["total"] == document["memory"]["held"]["kv_bytes"] == 0
    assert client.get("/metrics").status_code == 200


def test_metrics_are_what_the_statistics_say(scraped):
    found = samples(scraped)
    assert found["kvstow_kv_cache_bytes", ("place", "prefixes")] == 39_200_000
    assert found["kvstow_kv_cache_bf16_bytes", ("place", "in_flight")] == 150_500_000
    assert found["kvstow_state", ("state", "ok")] == 1
    assert found["kvstow_state", ("state", "loading")] == 0
    assert found["kvstow_requests_total", ("outcome", "answered")] == 12
    assert found["kvstow_requests_refused_total", ("reason", "queue_full")] == 2
    assert found["kvstow_prefix_tokens_total", ("found", "disk")] == 4096
    assert found["kvstow_decode_tokens_total",] == 4321
    assert found["kvstow_decode_seconds_total",] == 450
    layers = {("kind", "full"), ("path", "deferred"), ("scheme", "turbo:k8v3")}
    assert found["kvstow_layers", *sorted(layers)] == 29
    assert found["kvstow_time_to_first_token_seconds_bucket", ("le", "0.5")] == 4
    assert found["kvstow_time_to_first_token_seconds_bucket", ("le", "+Inf")] == 12
    assert found["kvstow_time_to_first_token_seconds_count",] == 12
    assert found["kvstow_request_duration_seconds_sum",] == 40


def test_metrics_are_named_as_prometheus_wants(scraped):
    ours = [f for f in scraped if f.name.startswith("kvstow")]
    assert len(ours) > 25
    for family in ours:
        assert family.documentation.endswith("."), family.name
        assert family.samples or family.name == "kvstow_kernel_check_passed", family.name
        if family.type == "counter":
            assert all(s.name.endswith("_total") for s in family.samples)
        elif family.name != "kvstow":
            assert family.name.endswith(UNITS + COUNTED), family.name


def test_labels_do_not_multiply(scraped, client, shown):
    shown[0] = replace(STATS, layers=tuple(replace(x, index=x.index + 100) for x in STATS.layers))
    again = exposition.text_string_to_metric_families(client.get("/metrics").text)
    ours = [k for k in samples(scraped) if k[0].startswith("kvstow")]
    assert ours == [k for k in samples(again) if k[0].startswith("kvstow")]


def test_prometheus_gets_openmetrics_where_it_asks_for_it(client):
    wanted = "application/openmetrics-text; version=1.0.0"
    response = client.get("/metrics", headers={"Accept": wanted})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = list(openmetrics.text_string_to_metric_families(response.text))
    assert "kvstow_requests" in {f.name for f in families}
    plain = client.get("/metrics").headers["content-type"]
    assert plain.startswith("text/plain; version=")


def test_the_process_itself_is_measured_too(scraped):
    names = {f.name for f in scraped}
    assert "process_resident_memory_bytes" in names or not names & {"process_cpu_seconds"}
