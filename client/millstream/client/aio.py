"""AsyncClient: text in, text out, over the two services; Client is the same without asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from millstream.client import jobs
from millstream.client.engine_stream import Observers
from millstream.client.execution import Executor
from millstream.client.jobs import ChatOptions, Message, Prompt, RequestOptions
from millstream.client.services import Services
from millstream.client.stream import Stream
from millstream.client.types import Health, Output, ServicesHealth, ServicesInfo
from millstream.rpc.errors import MillstreamError
from millstream.rpc.sampling_params import SamplingParams
from millstream.rpc.values import (
    check_bool,
    check_float,
    check_ids,
    check_list,
    check_text,
    refusal,
)
from millstream.v1 import tokenizer_pb2

Params = SamplingParams | Sequence[SamplingParams] | None


class AsyncClient:
    """A client of one engine, or of several alike, and one tokenizer service, for one event loop.

    Connects when first used. Any number of calls may run at once; they share two streams.
    Cancelling a task that waits here cancels its request. Not to be used in a child made by fork.
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
        """gRPC targets; None: not needed. Of several engines (`engine=[...]`, all with one model)
        each request goes to one that can run it at once, if there is one; of several, to the one
        with the least load, less what is saved where the prompt's beginning is cached. One that is
        away is left out. What it had not accepted goes to another, as does what finds a full queue.
        `timeout_s`: how long to wait until they serve, before EngineUnavailable is raised.
        `api_key`: clients with the same one share one client's part of the engine. `observer` is
        called with each message of an engine; a mapping has one for each target; what it raises
        ends the requests there. Raises InvalidArgument."""
        if not check_float("timeout_s", timeout_s) > 0:
            raise refusal("timeout_s", "seconds above 0", timeout_s)
        self.engine_target = engine
        self.tokenizer_target = tokenizer
        self._services = Services(
            engine=engine,
            tokenizer=tokenizer,
            timeout_s=timeout_s,
            api_key=api_key,
            observer=observer,
        )
        self._executor = Executor(self._services)

    # ---- generate and chat

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Output: ...
    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Any]: ...

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Completes a prompt, or a list of them: an Output, or a list of Outputs in order.

        A prompt is a string or a list of token ids. `sampling_params` is one for all or one per
        prompt. With n > 1 the Output is the first sample, and `output.samples` has all of them.
        Keywords: `detokenize=True`, `timeout_s` per request, `cache_salt`, `request_id`,
        `priority` (smaller first), `max_retries`. Requests that find the engine's queue full are
        sent again when it expects to have room, at most `max_retries` times if given. When one is
        refused or fails, the others end and then its exception is raised, or put in its place in
        the list with `return_exceptions`. `use_tqdm`: a progress bar; None: for a list, on a
        terminal.
        """
        jobs.check_options(options, RequestOptions)
        one = jobs.is_one_prompt(prompt) or not isinstance(prompt, Sequence)
        prompts = [prompt] if one else prompt
        return await self._executor.run(
            jobs.jobs_of(jobs.prompt_job, prompts, sampling_params, options),
            count=None if one else len(prompts),
            return_exceptions=return_exceptions,
            use_tqdm=use_tqdm,
        )

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> Any:
        """Answers a conversation (a list of {"role", "content"}) through the model's chat template:
        an Output; or a list of conversations: a list of Outputs. Otherwise as `generate`; further
        keywords: `tools`, `template`, `template_variables`, `add_generation_prompt`,
        `continue_final_message`, `plain_content`."""
        jobs.check_options(options, ChatOptions)
        one = jobs.is_one_chat(messages) or not isinstance(messages, Sequence)
        chats = [messages] if one else messages
        return await self._executor.run(
            jobs.jobs_of(jobs.chat_job, chats, sampling_params, options),
            count=None if one else len(chats),
            return_exceptions=return_exceptions,
            use_tqdm=use_tqdm,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Completes one prompt piece by piece: an asynchronous iterator of Deltas. Keywords as for
        `generate`, but `max_retries` is 0 by default: a full queue raises QueueFull. With n > 1
        the samples' deltas come mixed; `delta.sample` tells them apart. Leaving the loop cancels
        the request."""
        jobs.check_options(options, RequestOptions)
        return self._stream(jobs.jobs_of(jobs.prompt_job, [prompt], sampling_params, options))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """Answers one conversation piece by piece; as `chat` and `stream`."""
        jobs.check_options(options, ChatOptions)
        return self._stream(jobs.jobs_of(jobs.chat_job, [messages], sampling_params, options))

    def _stream(self, batch: Iterator[jobs.Job | MillstreamError]) -> Stream:
        (job,) = batch
        if isinstance(job, MillstreamError):
            raise job
        return Stream(functools.partial(self._executor.start, job))

    # ---- the rest

    async def encode(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Any:
        """A text's token ids; for a list of texts, a list of them."""
        wanted = "a string or a list of strings"
        texts = [text] if isinstance(text, str) else check_list("text", text, wanted)
        inputs = [tokenizer_pb2.EncodeInput(text=check_text("text", one)) for one in texts]
        sequences = await self._executor.tokenizer.encode(
            inputs, add_special_tokens=check_bool("add_special_tokens", add_special_tokens)
        )
        ids = [list(sequence.token_ids) for sequence in sequences]
        return ids[0] if isinstance(text, str) else ids

    async def decode(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = True,
    ) -> Any:
        """The text of token ids; for a list of sequences, a list of texts."""
        check_list("token_ids", token_ids, "a list of token ids or a list of those")
        one = not token_ids or jobs.is_one_prompt(token_ids)
        sequences: Sequence[Any] = [token_ids] if one else token_ids
        sequences = [check_ids("token_ids", sequence) for sequence in sequences]
        texts = await self._executor.tokenizer.decode(
            sequences, skip_special_tokens=check_bool("skip_special_tokens", skip_special_tokens)
        )
        return texts[0] if one else texts

    async def info(self) -> ServicesInfo:
        """What the services say of themselves: models, limits, fingerprints."""
        self._services.check_open()
        engine = tokenizer = None
        if self._services.engines:
            engine = (await self._services.any_engine()).engine
        if self._services.tokenizer:
            tokenizer = (await self._services.text_stream()).info
        return ServicesInfo(engine=engine, tokenizer=tokenizer)

    async def health(self) -> ServicesHealth:
        """The services' health at this moment; never raises, never waits for them."""

        async def check(connection: Any) -> Health | None:
            return await connection.check() if connection else None

        engine, tokenizer = await asyncio.gather(
            check(self._services.engines), check(self._services.tokenizer)
        )
        return ServicesHealth(engine=engine, tokenizer=tokenizer)

    async def close(self) -> None:
        """Cancels what runs and disconnects; idempotent."""
        await self._services.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
