"""Client: AsyncClient without asyncio. An event loop on a thread of its own does the work."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from millstream.client.aio import AsyncClient, Params
from millstream.client.engine_stream import Observers
from millstream.client.jobs import ChatOptions, Message, Prompt, RequestOptions
from millstream.client.stream import Stream
from millstream.client.types import Delta, Output, ServicesHealth, ServicesInfo
from millstream.rpc.errors import Cancelled, EngineUnavailable
from millstream.rpc.sampling_params import SamplingParams

T = TypeVar("T")

_LAST_TASKS_S = 1.0


class Client:
    """A client of one engine and one tokenizer service, for any number of threads.

    Connects when first used. A KeyboardInterrupt while waiting cancels the request. Create it after
    a fork, not before; in the child it raises RuntimeError.
    """

    def __init__(
        self,
        engine: str | Sequence[str] | None = "localhost:50051",
        tokenizer: str | None = "localhost:50052",
        *,
        timeout_s: float = 10.0,
        api_key: str = "",
        observer: Observers | None = None,
    ) -> None:
        """As AsyncClient's; `observer` is called on the client's own thread."""
        self._client = AsyncClient(
            engine, tokenizer, timeout_s=timeout_s, api_key=api_key, observer=observer
        )
        self.engine_target = engine
        self.tokenizer_target = tokenizer
        self._process_id = os.getpid()
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="millstream-client", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)  # while the thread still runs

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Output: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Any]: ...

    def generate(
        self,
        prompt: Any,
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any:
        return self._wait(
            self._client.generate(
                prompt,
                sampling_params,
                return_exceptions=return_exceptions,
                use_tqdm=use_tqdm,
                **options,
            )
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> Any:
        return self._wait(
            self._client.chat(
                messages,
                sampling_params,
                return_exceptions=return_exceptions,
                use_tqdm=use_tqdm,
                **options,
            )
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Delta]:
        return self._iterate(self._client.stream(prompt, sampling_params, **options))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[Delta]:
        return self._iterate(self._client.chat_stream(messages, sampling_params, **options))

    def encode(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Any:
        return self._wait(self._client.encode(text, add_special_tokens=add_special_tokens))

    def decode(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = True,
    ) -> Any:
        return self._wait(self._client.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def info(self) -> ServicesInfo:
        return self._wait(self._client.info())

    def health(self) -> ServicesHealth:
        return self._wait(self._client.health())

    def close(self) -> None:
        if os.getpid() != self._process_id:  # the parent's, whose thread is not here
            return
        with self._closing:  # a second thread returns when it is closed, too
            if self._loop.is_closed():
                return
            self._wait(self._close())
            atexit.unregister(self.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ----

    async def _close(self) -> None:
        await self._client.close()
        # gRPC's own tasks hear of their calls' ends; an event that finds the loop closed is an
        # error on stderr.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_LAST_TASKS_S)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _iterate(self, stream: Stream) -> Iterator[Delta]:
        end = object()

        async def take() -> Any:
            return await anext(stream, end)

        try:
            while (delta := self._wait(take())) is not end:
                yield delta
        finally:
            # Not waited for: the garbage collector may be here, on the loop's own thread.
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the request
                self._loop.call_soon_threadsafe(stream.cancel)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the client's loop. Whoever interrupts the waiting cancels the work."""
        if (hindrance := self._hindrance()) is not None:
            work.close()
            raise hindrance
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def _hindrance(self) -> Exception | None:
        """Why waiting for the client's loop would fail, or never end."""
        if self._loop.is_closed():
            return EngineUnavailable("the client is closed")
        if os.getpid() != self._process_id:
            return RuntimeError("a Client does not outlive a fork: create another in the child")
        if threading.current_thread() is self._thread:
            return RuntimeError("a Client cannot be waited for on its own thread (in an observer)")
        return None


def _copy_docstrings(methods: tuple[str, ...], of: type, to: type) -> None:
    for name in methods:
        method: Callable[..., Any] = getattr(to, name)
        method.__doc__ = getattr(of, name).__doc__


_copy_docstrings(
    ("generate", "chat", "stream", "chat_stream", "encode", "decode", "info", "health", "close"),
    of=AsyncClient,
    to=Client,
)
