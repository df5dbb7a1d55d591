"""The same prompt with and without a packed cache, and what each cache takes.

Run: python examples/attach.py
"""

from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache

import kvstow
from kvstow.blas import use_fast_blas
from kvstow.models import load

use_fast_blas()
model, tokenizer = load("smollm2")
question = [{"role": "user", "content": "Name three rivers in France."}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)

for scheme in ("off", "turbo:k8v3"):
    with kvstow.attached(model, scheme):
        cache = make_prompt_cache(model)
        answer = stream_generate(model, tokenizer, prompt, max_tokens=40, prompt_cache=cache)
        print(f"{scheme}: {''.join(piece.text for piece in answer)}")
        print(f"  {kvstow.usage(cache).kv_bytes:,} bytes of cache\n")
