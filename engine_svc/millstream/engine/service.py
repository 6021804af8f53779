"""The engine's front end: submissions become requests for the core, its steps become messages.

Life cycle (load, failed, drain, close) as millstream.rpc.server runs it. The RPCs are a dialect's
business (frontend/servicer.py), what a stream holds is frontend/streams.py's, what a submission may
say validation/submissions.py's, the core process frontend/supervisor.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from millstream.engine.config import EngineConfig
from millstream.engine.frontend import wire
from millstream.engine.frontend.admission import Admission
from millstream.engine.frontend.block_watch import BlockWatcher, BlockWatchers
from millstream.engine.frontend.clients import Clients
from millstream.engine.frontend.intake import Intake
from millstream.engine.frontend.stats_log import log_stats
from millstream.engine.frontend.step_parts import parts_of
from millstream.engine.frontend.streams import Stream
from millstream.engine.frontend.supervisor import Supervisor
from millstream.engine.model_files.config_values import ModelConfigError
from millstream.engine.plan import Phase, RunnerInfo
from millstream.engine.records import StepRecord
from millstream.engine.request import FinishReason
from millstream.engine.startup.phases import Phases, process_start_s
from millstream.engine.startup.spawn import SpawnedCore
from millstream.engine.validation.generation_config import sampling_defaults
from millstream.rpc.errors import EngineUnavailable, Unsupported
from millstream.rpc.server import StartError
from millstream.rpc.threads import in_daemon_thread
from millstream.v1 import engine_pb2

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 1.0  # after a drain's time limit, for the last messages to leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is served, once it is known where it lies; no path if the runner needs none."""

    name: str
    path: Path | None
    tokenizer_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A protocol that the engine speaks."""

    service_name: str
    register: Callable[[EngineService, grpc.aio.Server], None]  # adds its servicer to the server


class EngineService:
    """One engine. Everything runs on the event loop, but `find_model`, which may block for
    minutes (it downloads), raises StartError, and gets a thread of its own."""

    def __init__(
        self,
        config: EngineConfig,
        core: SpawnedCore,
        find_model: Callable[[], Model],
        *,
        dialects: Sequence[Dialect],
        max_message_bytes: int,
    ) -> None:
        self._dialects = dialects
        self._config = config
        self._find_model = find_model
        self._max_message_bytes = max_message_bytes
        self._watchers = BlockWatchers()
        self._spawned_s = core.spawned_s
        self._core = Supervisor(
            config, core, on_step=self._on_step, on_blocks=self._watchers.on_record
        )
        self._core.failed.add_done_callback(self._on_failed)
        self._model: Model | None = None
        self._defaults = engine_pb2.SamplingParams()
        self._intake = Intake(self._core)
        self._info: RunnerInfo | None = None
        self._clients = Clients()
        self._engine_info = engine_pb2.EngineInfo()
        self._unavailable: str | None = "the engine is starting"
        self._streams: dict[int, Stream] = {}
        self._stream_numbers = itertools.count(1)
        self._messages_sent = 0
        self._tokens_seen = 0
        self._stats_log: asyncio.Task[None] | None = None

    # ---- life cycle

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dialect.service_name for dialect in self._dialects)

    def register(self, server: grpc.aio.Server) -> None:
        for dialect in self._dialects:
            dialect.register(self, server)

    async def load(self) -> None:
        model = self._model = await in_daemon_thread(self._find_model, name="find-model")
        try:
            defaults = self._defaults = sampling_defaults(
                self._config.generation_config, model.path
            )
        except ModelConfigError as error:
            raise StartError(str(error)) from None
        loaded = await self._core.load(model.path)
        self._info = loaded.info
        self._intake.admission = Admission(self._info, self._config.max_queued_requests, defaults)
        self._engine_info = wire.engine_info(
            self._info,
            self._config,
            model=model.name,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            max_message_bytes=self._max_message_bytes,
        )
        self._unavailable = None
        self._stats_log = asyncio.create_task(
            log_stats(self._core, lambda: self._tokens_seen, lambda: len(self._streams))
        )
        self._log_phases(loaded.phases)

    def _log_phases(self, core_phases: Sequence[Phase]) -> None:
        """Where the time went, from this process's start: until it spawned the core, in the core,
        until its answer was here."""
        phases = Phases(process_start_s())
        phases.include([("front end", self._spawned_s - phases.began_s), *core_phases])
        phases.end("answer")
        logger.info("start: %s", phases)

    async def failed(self) -> str:
        return await asyncio.shield(self._core.failed)

    async def drain(self, timeout_s: float) -> None:
        self._unavailable = "the engine is stopping"
        for stream in self._streams.values():
            stream.end_when_idle(EngineUnavailable(self._unavailable))
        if not await self._streams_ended(timeout_s):
            for stream in self._streams.values():
                self._intake.finish(stream, stream.live_handles, FinishReason.SHUTDOWN)
            await self._streams_ended(SHUTDOWN_GRACE_S)

    async def close(self) -> None:
        if self._stats_log is not None:
            self._stats_log.cancel()
        await self._core.close()

    def _on_failed(self, failed: asyncio.Future[str]) -> None:
        if self._unavailable is None:
            self._unavailable = f"the engine failed: {failed.result()}"
        self._watchers.fail(EngineUnavailable(self._unavailable))
        for stream in self._streams.values():
            stream.fail(EngineUnavailable(self._unavailable))

    async def _streams_ended(self, timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._streams:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    # ---- for the servicers

    @property
    def unavailable(self) -> str | None:
        """Why no requests are taken, if that is so."""
        return self._unavailable

    @property
    def model(self) -> Model:
        """What is served. Raises EngineUnavailable while it is not known."""
        if self._model is None:
            raise EngineUnavailable(self._unavailable or "")
        return self._model

    @property
    def info(self) -> RunnerInfo | None:
        """What the core told once it was loaded; None before."""
        return self._info

    @property
    def sampling_defaults(self) -> engine_pb2.SamplingParams:
        """What the model's folder sets for parameters that a request does not."""
        return self._defaults

    @property
    def engine_info(self) -> engine_pb2.EngineInfo:
        """The model and the limits. Raises EngineUnavailable while it is not loaded."""
        if self._info is None:
            raise EngineUnavailable(self._unavailable or "")
        return self._engine_info

    async def stats(self) -> engine_pb2.GetStatsResponse:
        """Gauges and counters at this moment. Raises EngineUnavailable."""
        if self._info is None:
            raise EngineUnavailable(self._unavailable or "")
        gauges = await self._core.stats()
        return wire.stats(
            gauges, open_streams=len(self._streams), messages_sent=self._messages_sent
        )

    @contextlib.contextmanager
    def open_stream(self, api_key: str = "") -> Iterator[Stream]:
        """A stream for one RPC; what it has in flight at the end is cancelled. `api_key`: whose it
        is (frontend/clients.py). Raises EngineUnavailable when no requests are taken."""
        if self._unavailable is not None:
            raise EngineUnavailable(self._unavailable)
        number = next(self._stream_numbers)
        stream = Stream(number, self._clients.enter(api_key, number))
        self._streams[stream.number] = stream
        try:
            yield stream
        finally:
            del self._streams[stream.number]
            self._intake.finish(stream, stream.close(), FinishReason.CANCELLED)
            self._clients.leave(api_key, stream.client)

    @contextlib.contextmanager
    def watch_blocks(self) -> Iterator[BlockWatcher]:
        """Watches the prefix cache. Raises EngineUnavailable, or Unsupported if there is none."""
        if self._unavailable is not None or self._info is None:
            raise EngineUnavailable(self._unavailable or "")
        if not (self._config.prefix_caching and self._info.prefix_sharing):
            raise Unsupported("prefix caching is off: there are no KV events")
        with self._watchers.open(self._core) as watcher:
            yield watcher

    def cancel(self, stream: Stream, handles: Iterable[int]) -> None:
        """Ends requests as CANCELLED; those that are not live are ignored."""
        self._intake.finish(stream, filter(stream.is_live, handles), FinishReason.CANCELLED)

    def count_message(self) -> None:
        """One more message was sent on a stream."""
        self._messages_sent += 1

    def submit(self, stream: Stream, submissions: Iterable[engine_pb2.Submission]) -> None:
        """Accepts or refuses each, at once or when its grammar is compiled."""
        self._intake.submit(stream, submissions, self._unavailable)

    def _on_step(self, step: StepRecord) -> None:
        """Hands each stream its part of a step. What is left of closed streams is dropped."""
        self._tokens_seen += len(step.token_ids)
        if self._intake.admission is not None:
            now = asyncio.get_running_loop().time()
            self._intake.admission.note_step(len(step.finished), self._core.num_live, now)
        for number, part in parts_of(step).items():
            stream = self._streams.get(number)
            if stream is not None:
                stream.add_step(part)
