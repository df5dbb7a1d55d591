"""Greedy text of mlx-lm under a scheme, with a draft model and without."""

from types import SimpleNamespace

from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as host

import kvstow
from kvstow.integrations.mlx_lm import speculative
from tests.integration.tiny import build, tokens

PROMPT_TOKENS, MAX_TOKENS = 20, 24


def talking(name="llama", seed=0, **more):
    """A model whose greedy text is not one token for ever."""
    model = build(name, seed, **{"tie_word_embeddings": False} | more)
    if name.startswith("gemma"):  # tied whatever the config says: the last token must weigh less
        model.update(
            tree_map_with_path(
                lambda path, x: 0.01 * x if "embed_tokens.weight" in path else x,
                model.parameters(),
            )
        )
    return model


def sequential(model, scheme, fetch="auto"):
    with kvstow.attached(model, scheme, fetch=fetch):
        steps = generate_step(tokens(PROMPT_TOKENS)[0], model, max_tokens=MAX_TOKENS)
        return [int(token) for token, _ in steps]


def drafted(model, draft, scheme, n_draft, fetch="auto"):
    """Tokens of speculative decoding, both models attached, and the two prompt caches after it."""
    with (
        kvstow.attached(model, scheme, fetch=fetch),
        kvstow.attached(draft, scheme, fetch=fetch),
    ):
        pair = speculative.CachePair(*map(host.make_prompt_cache, (model, draft)))
        steps = list(
            speculative_generate_step(
                tokens(PROMPT_TOKENS)[0],
                model,
                draft,
                num_draft_tokens=n_draft,
                max_tokens=MAX_TOKENS,
                prompt_cache=pair,
            )
        )
    return SimpleNamespace(
        tokens=[int(token) for token, *_ in steps],
        from_draft=[from_draft for *_, from_draft in steps],
        caches=pair,
    )
