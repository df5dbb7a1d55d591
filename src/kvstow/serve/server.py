"""The whole server: a socket, the engine's thread, and uvicorn's event loop."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from kvstow.errors import KvstowError
from kvstow.integrations.mlx_lm.disk_prefixes import DiskPrefixes, ModelPrefixes
from kvstow.serve.app import make_app
from kvstow.serve.budget import Stored
from kvstow.serve.connection import Connection
from kvstow.serve.engine import Engine
from kvstow.serve.gateway import Gateway
from kvstow.serve.options import Defaults, EngineOptions, Limits, ModelOptions, PrefixFiles
from kvstow.serve.prompt_cache import WithinBudget
from kvstow.serve.provider import Provider
from kvstow.serve.service import Service

LAST_WORDS_S = 2  # for those whose answer is interrupted


@dataclass(frozen=True, slots=True)
class Setup:
    """All that was decided before the model is loaded.

    Attributes:
        model: What is served.
        caches: The models whose caches a request fills: it, and a draft model.
        kv_budget_bytes: For all caches.
        engine: mlx-lm's options.
        defaults: Where a request is silent.
        limits: Of requests.
        prefix_files: For prompts that outlive the server; None: there are none.
    """

    model: ModelOptions
    caches: tuple[Stored, ...]
    kv_budget_bytes: int
    engine: EngineOptions
    defaults: Defaults
    limits: Limits
    prefix_files: PrefixFiles | None = None

    def cache_bytes(self, n_tokens: int) -> int:
        """Bytes of the caches of one request of `n_tokens`."""
        return sum(stored.cache_bytes(n_tokens) for stored in self.caches)


def make_service(setup: Setup, disk: DiskPrefixes | None = None) -> Service:
    """The service, whose engine waits for its `start`.

    Args:
        setup: What to serve.
        disk: Prompts in files.
    """
    gateway = Gateway(
        setup.cache_bytes,
        setup.kv_budget_bytes,
        slots=setup.engine.decode_concurrency,
        max_queue=setup.limits.max_queue,
        queue_timeout_s=setup.limits.queue_timeout_s,
    )
    provider = Provider(setup.model, setup.engine)

    def on_disk(_: Any) -> ModelPrefixes | None:
        if disk is None:
            return None
        return disk.of(provider.model, provider.tokenizer, {"model": setup.model.served_name})

    kept = WithinBudget(
        setup.engine.prompt_cache_size,
        lambda: gateway.room_bytes,
        fresh=provider.fresh_caches,
        on_disk=on_disk,
        stats=None if disk is None else disk.stats,
    )
    return Service(
        Engine(provider, kept),
        gateway,
        model=setup.model,
        defaults=setup.defaults,
        limits=setup.limits,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises:
        KvstowError: If it cannot.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # Python says where again
        raise KvstowError(f"cannot listen on {host} port {port}: {why}") from error


class Server:
    """A service and the event loop that it is asked from.

    Args:
        setup: What to serve.
        drain_timeout_s: How long running requests may take once it is to end.
        on_ready: Called in the thread that generates, once the model is loaded.
        on_leave: Called at the first signal.

    Attributes:
        service: Which answers.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        drain_timeout_s: float,
        on_ready: Callable[[Service], None] = lambda _: None,
        on_leave: Callable[[Service], None] = lambda _: None,
    ) -> None:
        files = setup.prefix_files
        self._disk = (
            None if files is None else DiskPrefixes(files.directory, max_bytes=files.max_bytes)
        )
        self.service = make_service(setup, self._disk)
        self._on_ready = on_ready
        config = uvicorn.Config(
            make_app(self.service),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=Connection,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=round(drain_timeout_s) + LAST_WORDS_S,
        )
        self._http = _Http(
            config, self.service.interrupt, drain_timeout_s, lambda: on_leave(self.service)
        )

    def run(self, listener: socket.socket) -> bool:
        """Load the model and answer, until SIGTERM, SIGINT or `stop`.

        Returns:
            Whether all has ended. False: the model is still loading, in a thread that nothing
            can stop; the program has to be ended under it.

        Raises:
            Exception: What the model could not be loaded for; of kvstow's own where it is known.
        """
        engine = self.service.engine
        engine.start(on_ready=self._ready, on_death=self._died)
        try:
            asyncio.run(self._http.serve(sockets=[listener]))
        finally:
            has_ended = self._end()
        if engine.failure is not None and not engine.is_ready:
            raise engine.failure
        return has_ended

    def stop(self) -> None:
        """Take no more requests, and end after those that run."""
        self._http.should_exit = True

    def _end(self) -> bool:
        if self.service.state == "loading":
            return False
        self.service.engine.stop_and_join()
        if self._disk is not None:
            self._disk.close()
        return True

    def _ready(self) -> None:
        if not self.service.engine.model_provider.is_batchable:
            self.service.gateway.one_at_a_time()
        self._on_ready(self.service)

    def _died(self) -> None:
        if not self.service.engine.is_ready:
            self.stop()  # the model is not loaded, and will not be


class _Http(uvicorn.Server):
    """uvicorn's, for which a signal is a normal end.

    Args:
        config: uvicorn's.
        interrupt: Ends the requests that run.
        drain_timeout_s: When to call that, after the first signal; a second one calls it at once.
        on_leave: Called at the first.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        interrupt: Callable[[], None],
        drain_timeout_s: float,
        on_leave: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._interrupt = interrupt
        self._drain_timeout_s = drain_timeout_s
        self._on_leave = on_leave

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle them for the length of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, and wait for what runs, but not for ever."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._drain_timeout_s, self._interrupt)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _leave(self) -> None:
        if self.should_exit:
            self._interrupt()
        else:
            self._on_leave()
        self.should_exit = True
