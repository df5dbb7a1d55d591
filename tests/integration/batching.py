"""Replies of mlx-lm's batch generation, and the same replies alone."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as host

from tests.integration import tiny

LENGTHS = (23, 7, 40, 2, 12)
N_REPLY = (9, 12, 3, 7, 11)
# float32, whose sums a batch adds in another order; then an element between two codes may take
# the other one, and a logit of order 1 moves by a few thousandths.
LOGITS = 1e-2


def prompts(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.VOCAB, n).tolist() for n in lengths]


def together(model, requests, n_tokens, **options):
    """Replies of one batch: tokens and log-probabilities, and the cache that is left of each."""
    generator = BatchGenerator(model, **options)
    uids = generator.insert([list(p) for p in requests], list(n_tokens))
    replies = {uid: SimpleNamespace(tokens=[], logprobs=[], cache=None) for uid in uids}
    while responses := generator.next_generated():
        for r in responses:
            replies[r.uid].tokens.append(r.token)
            replies[r.uid].logprobs.append(np.array(r.logprobs.astype(mx.float32)))
            replies[r.uid].cache = r.prompt_cache
    generator.close()
    return [replies[uid] for uid in uids]


def alone(model, request, n_tokens):
    """The same reply without a batch, in the same appends: the prompt but one, then one by one."""
    cache = host.make_prompt_cache(model)
    steps = generate_step(mx.array(request), model, prompt_cache=cache, max_tokens=n_tokens)
    tokens, logprobs = zip(
        *((int(t), np.array(x.astype(mx.float32))) for t, x in steps), strict=True
    )
    return SimpleNamespace(tokens=list(tokens), logprobs=list(logprobs), cache=cache)


def assert_same_reply(got, wanted, tolerance):
    """Equal tokens and close logits, up to where the two best logits are that close too."""
    for a, b, x, y in zip(got.tokens, wanted.tokens, got.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)
        if a != b:
            second, best = np.sort(y)[-2:]
            assert best - second < 2 * tolerance
            break
