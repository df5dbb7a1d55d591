"""Many clients at once against `kvstow serve`, for minutes: does anything break, leak or change?

    python benchmarks/load_server.py --output benchmarks/results/load.jsonl
    python benchmarks/load_server.py --tiny --minutes 1 --output benchmarks/results/load.jsonl

Every client asks one thing after another, drawn from `mixture`: greedy answers of all kinds,
streamed or not, behind prefixes that are shared or not; answers that are drawn, with a seed or
without; prompts and answers that the client leaves; and what has to be refused. Afterwards each
greedy request is asked alone, and compared with what it was answered under load. With ``--tiny``
the model has random weights, so that there are many more requests.

It fails if a request ends in a way that its kind does not allow, if an answer differs where the two
likeliest tokens are not nearly equal, or if memory, budget and queue are not what they were before.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from kvstow.blas import use_fast_blas
from kvstow.evaluate.environment import environment
from kvstow.evaluate.texts import bundled
from kvstow.models import skeleton
from kvstow.models.convert import convert
from kvstow.models.locate import locate

NEAR_TIE_NATS = 0.3  # docs/limits.md: k8v3 beside other shapes of the same sums
SLACK_BYTES = 1 << 20  # of mlx's memory beside caches, after as before
RESIDENT_SLACK = 1.1  # of the process, last third of the run over the first
PATIENCE_S = 300
N_TEXTS = 6  # that prompts are made of: not more questions than can be asked again alone
JSON = dict[str, Any]
Token = tuple[str, float]  # and how much likelier it was than the next, in nats


@dataclass(frozen=True)
class Ask:
    """A request, and how it may end.

    Attributes:
        kind: Of the request, for the report.
        body: Its parameters.
        status: It has to have; 200 may be 429 as well.
        leaves_after: Seconds after which the client goes; for a stream, pieces.
        is_greedy: Whether its answer is to be compared.
    """

    kind: str
    body: JSON
    status: int = 200
    leaves_after: float | None = None
    is_greedy: bool = False

    @property
    def name(self) -> str:
        """What two of the same question have in common."""
        return json.dumps({k: v for k, v in self.body.items() if k != "stream"}, sort_keys=True)


@dataclass
class Seen:
    """What all clients saw."""

    ended: Counter[str] = field(default_factory=Counter)  # kind and how it ended
    errors: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    greedy: list[tuple[Ask, list[Token]]] = field(default_factory=list)
    n_tokens: int = 0


def mixture(texts: Sequence[str], rng: random.Random, context: int) -> Ask:
    """Draw one request.

    Args:
        texts: Prompts draw from these, so that some are asked often.
        rng: Source of randomness.
        context: Of the model, in tokens.
    """
    system = {"role": "system", "content": rng.choice(texts[:2])[: context // 4]}
    question = {"role": "user", "content": f"{rng.choice(texts)[:60]}?"}
    stream = rng.random() < 0.5
    chat = {"messages": [system, question], "max_tokens": 12, "stream": stream, "temperature": 0}
    short = {"prompt": rng.choice(texts)[:40], "max_tokens": 16, "stream": stream, "temperature": 0}
    long = short | {"prompt": rng.choice(texts)[: context // 2], "max_tokens": 6}
    fresh = f"{rng.random()} {rng.choice(texts)[: context // 2]}"  # found in no cache
    chat_lp, text_lp = {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}
    bad: list[JSON] = [
        {"temperature": 3},
        {"n": 2},
        {"top_k": -1},
        {"stop": [""]},
        {"unheard_of": 1},
    ]
    kinds = [
        (20, Ask("chat", chat | chat_lp, is_greedy=True)),
        (15, Ask("text", short | text_lp, is_greedy=True)),
        (8, Ask("long prompt", long | text_lp, is_greedy=True)),
        (6, Ask("stop word", chat | chat_lp | {"stop": ["e", "\n"]}, is_greedy=True)),
        (4, Ask("drawn", chat | {"temperature": rng.choice([0.5, 1.0]), "top_p": 0.9})),
        (2, Ask("seed", short | {"temperature": 1, "seed": rng.randrange(2**64), "max_tokens": 6})),
        (3, Ask("left in its prompt", long | {"prompt": fresh, "stream": False}, leaves_after=0.1)),
        (3, Ask("left waiting", long | {"stream": False}, leaves_after=rng.random() / 100)),
        (4, Ask("left in its answer", chat | {"stream": True, "max_tokens": 64}, leaves_after=3)),
        (3, Ask("bad parameter", chat | rng.choice(bad), status=400)),
        (2, Ask("too long", chat | {"max_tokens": 10 * context}, status=400)),
        (2, Ask("another model", short | {"model": "another"}, status=404)),
    ]
    return rng.choices([ask for _, ask in kinds], [weight for weight, _ in kinds])[0]


async def send(client: AsyncOpenAI, ask: Ask, seen: Seen | None = None) -> list[Token]:
    """Send a request; returns what is known of its tokens.

    Raises:
        TimeoutError: If the client goes.
    """
    body: JSON = {"model": "default_model"} | ask.body
    unheard = {k: body.pop(k) for k in ("top_k", "unheard_of") if k in body}
    resource: Any = client.chat.completions if "messages" in body else client.completions
    begin = time.monotonic()
    asking = resource.create(**body, extra_body=unheard)
    if not body["stream"]:
        answer = await asyncio.wait_for(asking, ask.leaves_after)
        return tokens_of(answer.choices[0])
    tokens: list[Token] = []
    pieces = 0
    async with await asking as stream:
        async for piece in stream:
            pieces += 1
            tokens += tokens_of(piece.choices[0])
            if pieces == 2 and seen is not None:
                seen.first_token_s.append(time.monotonic() - begin)
            if ask.leaves_after is not None and pieces > ask.leaves_after:
                raise TimeoutError
    return tokens


def tokens_of(choice: Any) -> list[Token]:
    """Tokens of an answer that came with log-probabilities, or of a piece of one."""
    found = choice.logprobs
    if found is None:
        return []
    if hasattr(found, "content"):
        return [(t.token, _gap([top.logprob for top in t.top_logprobs])) for t in found.content]
    return [
        (token, _gap(list(top.values())))
        for token, top in zip(found.tokens, found.top_logprobs, strict=True)
    ]


def _gap(logprobs: list[float]) -> float:
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


async def one(client: AsyncOpenAI, ask: Ask, seen: Seen) -> float:
    """Send a request and note how it ended; returns for how long to stay away."""
    begin = time.monotonic()
    try:
        tokens = await send(client, ask, seen)
    except TimeoutError:
        seen.ended[f"{ask.kind}: gone"] += 1
        return 0
    except APIStatusError as error:
        seen.ended[f"{ask.kind}: {error.status_code}"] += 1
        busy = error.status_code == 429 and ask.status == 200
        if not busy and error.status_code != ask.status:
            seen.errors.append(f"{ask.kind}: {error}")
        return min(float(error.response.headers.get("retry-after", 0)), 1.0)
    except (APIConnectionError, OSError) as error:
        seen.errors.append(f"{ask.kind}: {error!r}")
        return 1
    seen.ended[f"{ask.kind}: 200"] += 1
    if ask.status != 200:
        seen.errors.append(f"{ask.kind}: it was answered")
    seen.whole_s.append(time.monotonic() - begin)
    seen.n_tokens += len(tokens)
    if ask.is_greedy:
        seen.greedy.append((ask, tokens))
    return 0


async def load(url: str, asks: Iterator[Ask], n_clients: int, seconds: float) -> Seen:
    """So many clients, for so long; each has a connection of its own."""
    seen, end = Seen(), time.monotonic() + seconds

    async def client() -> None:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as http:
            while time.monotonic() < end:
                await asyncio.sleep(await one(http, next(asks), seen))

    await asyncio.gather(*(client() for _ in range(n_clients)))
    return seen


def health(url: str, seconds: float) -> list[float]:
    """Seconds that ``/health`` took, each time; for a process of its own."""
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        get(f"{url}/health")
        took.append(time.monotonic() - begin)
        time.sleep(0.2)
    return took


async def compare(url: str, greedy: Sequence[tuple[Ask, list[Token]]]) -> JSON:
    """Ask each greedy request again, alone, and say where answers under load differ from it."""
    gaps, alone = [], {}
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as http:
        for ask, under_load in greedy:
            if ask.name not in alone:
                alone[ask.name] = await send(http, ask)
            gaps.append(difference(alone[ask.name], under_load))
    parted = [gap for gap in gaps if gap is not None]
    return {
        "compared": len(gaps),
        "questions": len(alone),
        "equal": len(gaps) - len(parted),
        "largest_gap_nats": max(parted, default=0.0),
    }


def difference(alone: Sequence[Token], other: Sequence[Token]) -> float | None:
    """How much likelier the first token that differs was than the next; None if none does."""
    for (a, gap), (b, _) in zip(alone, other, strict=False):
        if a != b:
            return gap
    return None if len(alone) == len(other) else float("inf")


def get(url: str | urllib.request.Request) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return json.load(response)


def at_rest(url: str) -> JSON:
    """The server's statistics, once nothing runs any more, and the last that ran was one request.

    The engine keeps arrays of its last step, which are larger the more decoded together.

    Raises:
        SystemExit: If that does not come.
    """
    end = time.monotonic() + PATIENCE_S
    body = json.dumps({"prompt": "The sea", "max_tokens": 4}).encode()
    asking = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    is_alone = False
    while time.monotonic() < end:
        stats: JSON = get(f"{url}/v1/kvstow/stats")
        if not stats["work"]["running"] and not stats["budget"]["reserved_bytes"]:
            if is_alone:
                return stats
            get(asking)
            time.sleep(1)  # until the engine has looked again
            is_alone = True
        time.sleep(0.1)
    raise SystemExit(f"the server is not idle after {PATIENCE_S} s")


def besides_caches(stats: JSON) -> int:
    """Bytes that mlx has allocated for anything but caches."""
    return int(stats["memory"]["mlx_active_bytes"] - stats["memory"]["held"]["kv_bytes"])


# --- the program


@contextmanager
def serving(options: argparse.Namespace, model: str, folder: str) -> Iterator[tuple[str, Any]]:
    """The server's address and process, once it is ready.

    Raises:
        SystemExit: If it does not become so.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstow", "serve", "--model", model, "--port", str(port)),
            *("--dtype", "float32", "--kv-quant", options.kv_quant),
            *("--kv-budget", options.kv_budget, "--max-queue", str(options.max_queue)),
            *("--decode-concurrency", str(options.decode_concurrency), "--queue-timeout", "300"),
            *("--prefix-cache", folder),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError):
                if get(f"{url}/health") == {"status": "ok"}:
                    break
            time.sleep(0.2)
        else:
            said = f"ended with {process.poll()}" if process.poll() is not None else "is not ready"
            raise SystemExit(f"the server {said}")
        yield url, process
    finally:
        process.kill()
        process.wait()


def resident_bytes(pid: int) -> int:
    """Linux only."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def tiny(folder: Path) -> str:
    """A directory with the demo model's tokenizer and two layers of random weights."""
    whole = convert(Path(locate("smollm2").path or ""), "float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((whole / name).read_bytes())
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.random.seed(0)
    model: Any = skeleton(config, "float32")
    weights = {
        name: mx.random.normal(array.shape, scale=0.3) + ("norm" in name)
        for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


async def measured(url: str, pid: int, options: argparse.Namespace) -> JSON:
    """Load the server; what came of it."""
    texts = [text.text for text in bundled()][:N_TEXTS]
    rng = random.Random(0)
    asks = iter(lambda: mixture(texts, rng, options.context), None)
    warm = await load(url, asks, options.clients, options.warm_up_s)
    before = await asyncio.to_thread(at_rest, url)
    thirds: list[int] = []
    health_s: list[float] = []
    seen = Seen()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        for _ in range(3):
            seconds = 20 * options.minutes
            watching = other.submit(health, url, seconds)
            merge(seen, await load(url, asks, options.clients, seconds))
            health_s += watching.result()  # the clients are through
            await asyncio.to_thread(at_rest, url)
            thirds.append(resident_bytes(pid))
    after = await asyncio.to_thread(at_rest, url)
    return {
        "warm_up_requests": sum(warm.ended.values()),
        "requests": sum(seen.ended.values()),
        "ended": dict(sorted(seen.ended.items())),
        "errors": warm.errors + seen.errors,
        "tokens": seen.n_tokens,
        "first_token_s": quantiles(seen.first_token_s),
        "whole_s": quantiles(seen.whole_s),
        "health_s": quantiles(health_s),
        **await compare(url, seen.greedy),
        "mlx_besides_caches_bytes": [besides_caches(before), besides_caches(after)],
        "kept_bytes": after["memory"]["prefixes"]["kv_bytes"],
        "resident_bytes_by_third": thirds,
        "waiting": after["work"]["waiting"],
        "reserved_bytes": after["budget"]["reserved_bytes"],
        "prefix_hits": {
            place: after["prefixes"][place]["requests"] for place in ("memory", "disk")
        },
        "files_written": after["prefixes"]["disk_writes"],
    }


def merge(seen: Seen, part: Seen) -> None:
    for name, value in vars(part).items():
        setattr(seen, name, getattr(seen, name) + value)


def quantiles(seconds: Sequence[float]) -> JSON:
    """Median, 95th percentile and the longest."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=20)
    return {"p50": round(cuts[9], 3), "p95": round(cuts[18], 3), "max": round(max(seconds), 3)}


def failures(row: JSON) -> list[str]:
    """What does not hold."""
    before, after = row["mlx_besides_caches_bytes"]
    first, *_, last = row["resident_bytes_by_third"]
    checks = {
        "a request ended as it may not": not row["errors"],
        "an answer differs from that of the same request alone": row["largest_gap_nats"]
        <= NEAR_TIE_NATS,
        "mlx holds more than before": after - before <= SLACK_BYTES,
        "the process has grown": last <= RESIDENT_SLACK * first,
        "something waits or is reserved": row["waiting"] == row["reserved_bytes"] == 0,
        "the server did not end in good order": row["exit_code"] == 0,
    }
    return [what for what, holds in checks.items() if not holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tiny", action="store_true", help="random weights, two layers")
    parser.add_argument("--kv-quant", default="turbo:k8v3+stored")
    parser.add_argument("--kv-budget", default="48MB")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--decode-concurrency", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=20)
    parser.add_argument("--context", type=int, default=2000, help="of prompts, in characters")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--warm-up-s", type=float, default=20.0)
    options = parser.parse_args()
    about = environment(" ".join(["python", *sys.argv]), use_fast_blas())
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder)) if options.tiny else options.model
        with serving(options, model, f"{folder}/prefixes") as (url, process):
            row = asyncio.run(measured(url, process.pid, options))
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=PATIENCE_S)[1]
    row = {
        "bench": "load",
        "model": "random" if options.tiny else model,
        **settings(options),
        **row,
    }
    row |= {"exit_code": process.returncode, "warnings": said.count("warning"), **about}
    row["failures"] = failures(row)
    print(json.dumps(row, indent=1))
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as file:
            print(json.dumps(row), file=file)
    sys.exit(1 if row["failures"] else 0)


def settings(options: argparse.Namespace) -> JSON:
    names = ("kv_quant", "kv_budget", "clients", "decode_concurrency", "max_queue", "minutes")
    return {name: getattr(options, name) for name in names}


if __name__ == "__main__":
    main()
