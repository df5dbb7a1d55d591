"""A policy says one scheme for each layer, and refuses what it cannot mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import PolicyError, SchemeError
from kvstow.policy import LAYER_KINDS, Policy, Rule, spans
from kvstow.scheme import Off, Scheme, Turbo

schemes = st.sampled_from(["off", "affine:8", "turbo:k8v3", "turbo:k4v2+search"]).map(Scheme.parse)
indices = st.frozensets(st.integers(0, 40), min_size=1)
rules = st.one_of(
    st.builds(Rule, schemes, indices, st.none()),
    st.builds(Rule, schemes, st.none(), st.sampled_from(LAYER_KINDS)),
    st.builds(Rule, schemes, indices, st.sampled_from(LAYER_KINDS)),
)
policies = st.builds(Policy, schemes, st.lists(rules, max_size=5).map(tuple))


@given(policies)
def test_a_policy_is_what_its_file_says(policy):
    assert Policy.from_dict(json.loads(json.dumps(policy.as_dict()))) == policy


@given(policies)
def test_a_policy_is_what_its_one_line_says(policy):
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "text", ["policy()", "policy(turbo; )", "policy(turbo; x: off)", "policy(turbo; 1 off)"]
)
def test_a_line_that_says_no_policy_is_refused(text):
    with pytest.raises(SchemeError):
        Policy.parse(text)


@given(policies, st.integers(0, 45), st.sampled_from(LAYER_KINDS))
def test_a_layer_takes_the_first_rule_that_names_it(policy, index, kind):
    expected = policy.default
    for rule in reversed(policy.rules):
        if rule.layers is None or index in rule.layers:
            expected = rule.scheme if rule.kind in (None, kind) else expected
    assert policy.of_layer(index, kind) == expected
    assert expected in policy.schemes


@given(policies, policies)
def test_policies_that_differ_are_spelled_differently(a, b):
    assert (str(a) == str(b)) == (a == b)


@given(indices)
def test_spans_are_read_back(layers):
    policy = Policy.from_dict({"rules": [{"layers": spans(layers), "scheme": "off"}]})
    assert policy.rules[0].layers == layers


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(3, {3}), ("3", {3}), ("0-2, 7", {0, 1, 2, 7}), ([0, "4-5"], {0, 4, 5}), ("5,5", {5})],
)
def test_layers_are_numbers_ranges_or_lists_of_both(layers, expected):
    policy = Policy.from_dict({"rules": [{"layers": layers, "scheme": "off"}]})
    assert policy.rules[0].layers == expected


def test_a_scheme_is_a_policy_for_all_layers():
    assert Policy.of("turbo") == Policy(Turbo())
    assert Policy.of(None).uniform == Off()
    assert str(Policy.of("turbo")) == "turbo:k8v3"
    assert Policy.of(Policy.of("off")) == Policy(Off())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "a policy must be a JSON object"),
        ({"defualt": "off"}, "has the keys"),
        ({"rules": {}}, "rules must be a list"),
        ({"rules": ["off"]}, "a rule must be a JSON object"),
        ({"rules": [{"layers": 1}]}, r"needs \['scheme'\]"),
        ({"rules": [{"scheme": "off"}]}, "needs 'layers' or 'kind'"),
        ({"rules": [{"layer": 1, "scheme": "off"}]}, "has the keys"),
        ({"rules": [{"kind": "linear", "scheme": "off"}]}, "kind must be one of"),
        ({"rules": [{"kind": None, "scheme": "off"}]}, "kind must be one of"),
        ({"rules": [{"layers": "3-1", "scheme": "off"}]}, "layers must be like"),
        ({"rules": [{"layers": "", "scheme": "off"}]}, "layers must be like"),
        ({"rules": [{"layers": [], "scheme": "off"}]}, "layers must be like"),
        ({"rules": [{"layers": -1, "scheme": "off"}]}, "layers must be like"),
        ({"rules": [{"layers": True, "scheme": "off"}]}, "layers must be like"),
        ({"rules": [{"layers": 1.5, "scheme": "off"}]}, "layers must be like"),
        ({"default": 8}, "a scheme must be a string"),
    ],
)
def test_what_cannot_be_meant_is_refused(content, said):
    with pytest.raises(PolicyError, match=said):
        Policy.from_dict(content)


def test_a_scheme_outside_the_grammar_is_refused_with_the_grammar():
    with pytest.raises(SchemeError, match="key bits must be one of"):
        Policy.from_dict({"rules": [{"layers": 1, "scheme": "turbo:k9v3"}]})


def test_rules_about_layers_that_are_not_there_are_refused():
    kinds = {0: "full", 1: "sliding", 3: "full"}
    Policy.from_dict({"rules": [{"layers": "0-1", "scheme": "off"}]}).check(kinds)
    with pytest.raises(PolicyError, match="names layers 2, 4"):
        Policy.from_dict({"rules": [{"layers": "0-4", "scheme": "off"}]}).check(kinds)
    with pytest.raises(PolicyError, match="names no layer"):
        Policy.from_dict({"rules": [{"kind": "sliding", "scheme": "off"}]}).check({0: "full"})
    both = {"kind": "sliding", "layers": 0, "scheme": "off"}
    with pytest.raises(PolicyError, match="names no layer"):
        Policy.from_dict({"rules": [both]}).check(kinds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"default": "off", "default": "turbo"}', "given twice"),
        ('{"default": "none"}', "none"),
        ("\udcff", "cannot read"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path, text, said):
    path = tmp_path / "policy.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PolicyError, match=said) as refusal:
        Policy.read(path)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="cannot read"):
        Policy.read(tmp_path / "missing.json")
