"""What mlx-lm's server engine does, and what of it `kvstow.serve` goes around.

Where one of these fails, mlx-lm has changed: something in `kvstow.serve` may be left out, and
docs/server.md says something that is not true any more.
"""

import inspect
from types import SimpleNamespace

import pytest

generate = pytest.importorskip("mlx_lm.generate")
server = pytest.importorskip("mlx_lm.server")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")

pytestmark = pytest.mark.mlx


def test_what_is_overridden_is_there():
    overridden = {
        "_generate": [],
        "_is_batchable": ["args"],
        "_make_state_machine": ["model_key", "tokenizer", "stop_words"],
        "_next_request": ["timeout"],
        "_run_generate": [],
        "_serve_single": ["request", "stream"],
        "_tokenize": ["tokenizer", "request", "args"],
        "generation_available": [],
        "join": [],
    }
    for name, wanted in overridden.items():
        parameters = list(inspect.signature(getattr(server.ResponseGenerator, name)).parameters)
        assert parameters == ["self", *wanted]


def test_nothing_is_left_to_read_of_a_prompt_that_is_held_whole_and_that_is_an_error():
    model, kept = tiny.build("llama"), host.LRUPromptCache()
    kept.insert_cache("m", [1, 2, 3], host.make_prompt_cache(model))
    cache, rest = kept.fetch_nearest_cache("m", [1, 2, 3])
    assert rest == []
    with pytest.raises(ValueError, match="empty prompt"):
        generate.BatchGenerator(model).insert_segments([[rest]], caches=[cache])


def test_a_stop_word_is_cut_from_a_text_that_goes_on():
    tokenizer = SimpleNamespace(
        has_thinking=False,
        has_tool_calling=False,
        structural_markers=[],
        response_transitions={},
    )
    machine = generate.make_text_state_machine(tokenizer, ["he"])
    _, text, name = machine.step(machine.make_state(), "of the sea")
    assert (text, name) == ("of t sea", "normal")


def test_speculation_leaves_less_in_the_cache_than_it_has_answered():
    model, draft = tiny.build("llama"), tiny.build("llama", seed=1)
    cache = host.make_prompt_cache(model) + host.make_prompt_cache(draft)
    prompt, n_new = tiny.tokens(5)[0], 6
    step = generate.speculative_generate_step(
        prompt, model, draft, prompt_cache=cache, max_tokens=n_new
    )
    assert len(list(step)) == n_new
    assert cache[0].offset == prompt.size + n_new - 1
