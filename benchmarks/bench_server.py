"""Throughput of `kvstow serve` against mlx-lm's own server, under the same clients in one run.

    python benchmarks/bench_server.py --output benchmarks/results/server.jsonl

All servers are started first, then each takes the same burst of requests in turn, round after
round; medians over the rounds are reported. Clients stream through the ``openai`` package.
Prompts differ in their first words, so that nothing is reused. mlx-lm's server is started with
the same BLAS as ours.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError

from kvstow.blas import use_fast_blas
from kvstow.evaluate.environment import environment
from kvstow.evaluate.texts import bundled
from kvstow.models.convert import convert
from kvstow.models.locate import locate

MLX_LM = "\n".join(
    [
        "from kvstow.blas import use_fast_blas",
        "use_fast_blas()",
        "from mlx_lm.server import main",
        "main()",
    ]
)
PATIENCE_S = 300


@dataclass
class Server:
    """One that runs, and what its bursts measured."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    tokens_per_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """Of the process now; Linux only."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])


def directory(model: str, dtype: str) -> str:
    """What mlx-lm loads where ours is told `model`."""
    source = locate(model)
    if source.path is None:
        return source.name
    return str(convert(source.path, dtype) if source.kind == "gguf" else source.path)


def command(name: str, model: str, dtype: str, port: int) -> list[str]:
    """Of the server ``mlx-lm``, or ours under a scheme."""
    if name == "mlx-lm":
        options = ["--model", directory(model, dtype), "--port", str(port)]
        return [sys.executable, "-c", MLX_LM, *options]
    ours = [sys.executable, "-m", "kvstow", "serve", "--model", model, "--dtype", dtype]
    return [*ours, "--kv-quant", name, "--port", str(port)]


@contextmanager
def running(name: str, model: str, dtype: str, *more: str) -> Iterator[Server]:
    """A server that is ready; `more` are options of ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command(name, model, dtype, port), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(process, f"{url}/health", name)
        yield Server(name, f"{url}/v1", process)
    finally:
        process.terminate()
        process.wait(60)


def _await(process: subprocess.Popen[bytes], url: str, name: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server {name} ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(f"the server {name} was not ready after {PATIENCE_S} s")


def prompts(n: int, n_chars: int) -> list[str]:
    """`n` pieces of the bundled texts, no two with the same beginning.

    Raises:
        ValueError: If the texts are too short.
    """
    text = "".join(t.text for t in bundled())
    if n * n_chars > len(text):
        raise ValueError(f"{n} prompts of {n_chars} characters need more text than is bundled")
    return [f"{i}: {text[i * n_chars : (i + 1) * n_chars]}" for i in range(n)]


async def ask(client: AsyncOpenAI, server: Server, prompt: str, max_tokens: int) -> int:
    """Stream one reply; returns its tokens."""
    begin, first, n_tokens = time.monotonic(), None, 0
    try:
        stream = await client.completions.create(
            model="default_model",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            first = first or time.monotonic() - begin
            if chunk.usage is not None:
                n_tokens = chunk.usage.completion_tokens
        server.first_token_s.append(first or 0)
    except OpenAIError as error:
        server.errors.append(str(error))
    return n_tokens


async def burst(server: Server, texts: list[str], options: argparse.Namespace) -> None:
    """All `texts` from so many clients at a time."""
    limit = asyncio.Semaphore(options.clients)
    async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

        async def one(text: str) -> int:
            async with limit:
                return await ask(client, server, text, options.max_tokens)

        begin = time.monotonic()
        tokens = sum(await asyncio.gather(*map(one, texts)))
    server.tokens_per_s.append(tokens / (time.monotonic() - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--servers", nargs="+", default=["mlx-lm", "off", "turbo"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16, help="of a round")
    parser.add_argument("--prompt-chars", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    options = parser.parse_args()
    texts = prompts(options.requests * (options.rounds + 1), options.prompt_chars)
    with ExitStack() as stack:
        about = options.model, options.dtype
        servers = [stack.enter_context(running(name, *about)) for name in options.servers]
        for _ in range(options.rounds + 1):
            some, texts = texts[: options.requests], texts[options.requests :]
            for server in servers:
                asyncio.run(burst(server, some, options))
        report(servers, options)


def report(servers: list[Server], options: argparse.Namespace) -> None:
    rates = {s.name: statistics.median(s.tokens_per_s[1:]) for s in servers}
    about = environment(" ".join(["python", *sys.argv]), use_fast_blas())
    for server in servers:
        row = {
            "bench": "server",
            "model": options.model,
            "dtype": options.dtype,
            "server": server.name,
            "clients": options.clients,
            "requests": options.requests,
            "prompt_chars": options.prompt_chars,
            "max_tokens": options.max_tokens,
            "tokens_per_s": round(rates[server.name], 2),
            "tokens_per_s_all": [round(x, 2) for x in server.tokens_per_s[1:]],
            "vs_mlx_lm": round(rates[server.name] / rates["mlx-lm"], 3)
            if "mlx-lm" in rates
            else None,
            "first_token_s": round(statistics.median(server.first_token_s), 3),
            "resident_bytes": server.resident_bytes,
            "errors": server.errors,
            **about,
        }
        print(f"{server.name:12} {row['tokens_per_s']:9} tokens/s {row['vs_mlx_lm']}x", flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
