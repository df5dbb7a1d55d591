"""Run in several processes: each architecture split over them, against itself unsplit.

Prints a JSON object per architecture, from the first process, and the seed of each process.
"""

import gc
import json
import sys

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import kvstow
from kvstow.blas import use_fast_blas
from kvstow.cli.processes import Processes, shared_seed
from tests.integration import architectures, tiny

SCHEDULE = (12, 5, 1, 1)


def logits_and_bytes(model):
    with kvstow.attached(model, "turbo:k8v3") as report:
        cache, text, at, logits = make_prompt_cache(model), tiny.tokens(100), 0, []
        for n in SCHEDULE:
            logits.append(np.array(model(text[:, at : at + n], cache=cache).astype(mx.float32)))
            at += n
    ours = [c for c, layer in zip(cache, report.layers, strict=True) if layer.quantised]
    return np.concatenate(logits, axis=1), kvstow.usage(ours).kv_bytes


def say(**told):
    print(json.dumps(told), flush=True)


def main(names):
    use_fast_blas()
    group = mx.distributed.init(strict=True)
    mx.random.seed(group.rank())
    together = Processes(group, group.size(), group.rank())
    say(rank=group.rank(), seed=shared_seed(None, together))
    for name in names:
        model = architectures.build(name, vocab_size=tiny.VOCAB + 1)  # an even number
        whole, whole_bytes = logits_and_bytes(model)
        model.shard(group)
        part, part_bytes = logits_and_bytes(model)
        moved = float(np.sqrt(np.square(part - whole).mean()) / whole.std())
        if group.rank() == 0:
            say(name=name, moved=moved, bytes=part_bytes / whole_bytes, size=group.size())
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
