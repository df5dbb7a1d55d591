"""How the server ends while clients ask, and what is on disk then."""

import random
import signal
import threading
import time

import pytest

from kvstow.snapshot.prefixes import PrefixDirectory, files

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.mlx
N_CLIENTS = 3  # as many finish at once as may wait for the disk
N_TOKENS = 200
ENDLESS = {str(token): -100 for token in range(257, 260)}


class Clients:
    """Clients that ask one prompt after another, no two alike, until the server is gone.

    Attributes:
        finished: Prompts that were answered.
        cut_off: Answers that ended before their time.
    """

    def __init__(self, url, seed):
        self.url, self.finished, self.cut_off = f"{url}/v1", [], []
        self._random = random.Random(seed)
        self._threads = [threading.Thread(target=self._run) for _ in range(N_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=30) as client:
            while True:
                prompt = [self._random.randrange(256) for _ in range(N_TOKENS)]
                try:
                    stream = client.completions.create(
                        model="tiny", prompt=prompt, max_tokens=40, stream=True, logit_bias=ENDLESS
                    )
                except openai.APIError:  # nobody listens
                    return
                try:
                    reasons = [part.choices[0].finish_reason for part in stream]
                except openai.APIError as error:
                    self.cut_off.append(error)
                    return
                if reasons[-1] != "length":
                    self.cut_off.append(reasons)
                self.finished.append(prompt)

    def join(self):
        for thread in self._threads:
            thread.join(30)


def cached(process, prompt):
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
    return usage.prompt_tokens_details.cached_tokens


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_no_end_of_a_server_loses_a_prompt_that_is_on_disk(tiny, program, tmp_path):
    """Killed while it answers and writes, twice; then ended in good order."""
    root = tmp_path / "prefixes"
    start = ("--model", tiny.llama, "--served-name", "tiny", "--prefix-cache", root)
    kept = set()
    for seed in range(2):
        process = program(*start)
        clients = Clients(process.url, seed)
        enough = len(kept) + 5
        wait_for(lambda n=enough: len(files.entries(root)) >= n)
        time.sleep(random.Random(seed).random() / 5)
        kept |= {found.path for found in files.entries(root)}
        process.kill()
        clients.join()
        assert process.wait(20) == -signal.SIGKILL
        assert kept <= {found.path for found in files.entries(root)}
        directory = PrefixDirectory(root)
        for found in files.entries(root):
            directory.check(found.path)

    process = program(*start)
    clients = Clients(process.url, 2)
    wait_for(lambda: len(clients.finished) > 5)
    process.send_signal(signal.SIGTERM)
    clients.join()
    assert process.wait(20) == 0
    assert clients.cut_off == []
    said = "".join([*process.lines, *process.stderr])
    assert "warning" not in said
    assert "rror" not in said

    process = program(*start)
    assert [cached(process, prompt) for prompt in clients.finished[-6:]] == [N_TOKENS - 1] * 6
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


BROKEN = """
import sys
from mlx_lm.generate import BatchGenerator
from kvstow.cli import main
def fails(_):
    raise MemoryError("no more of it")
BatchGenerator.next = fails
main()
"""


def test_a_server_whose_engine_died_answers_errors_until_it_is_stopped_and_says_so(tiny, program):
    process = program("--model", tiny.llama, code=BROKEN)
    answer = httpx.post(f"{process.url}/v1/completions", json={"prompt": "abc"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
    assert httpx.get(f"{process.url}/health").status_code == 503
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 1
    assert process.stderr.read().splitlines()[-1] == (
        "Error: the thread that generates died: MemoryError('no more of it')"
    )
