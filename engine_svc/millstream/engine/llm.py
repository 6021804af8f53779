"""LLM: the engine in this process, for tests, benchmarks and notebooks; nano-vllm's surface.

The same validation, EngineCore and ModelRunner as behind gRPC: there is no second path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from millstream.engine.core import EngineCore
from millstream.engine.grammars.errors import GrammarError, GrammarsFullError, VocabularyError
from millstream.engine.in_process.arguments import (
    Prompt,
    engine_config,
    params_list,
    prompt_ids,
    prompt_list,
)
from millstream.engine.in_process.interrupts import uninterrupted
from millstream.engine.load import find_model, load_core
from millstream.engine.plan import RunnerInfo, TokenLogprobs
from millstream.engine.records import FinishedRecord, Stats
from millstream.engine.request import FinishReason, GrammarSpec, Request
from millstream.engine.validation.generation_config import sampling_defaults
from millstream.engine.validation.structured_output import refusal_of
from millstream.engine.validation.submissions import to_requests
from millstream.rpc.errors import EngineFault, Unsupported
from millstream.rpc.sampling_params import SamplingParams, to_proto
from millstream.rpc.values import check_text, refusal
from millstream.v1 import engine_pb2


@dataclasses.dataclass(slots=True)
class _Generated:
    """What a request has got so far."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)


class LLM:
    """A model and its engine core. One thread only may use it."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Loads a model: a folder, a Hugging Face id, or None for the embedded default model.

        Options are the fields of EngineConfig; with load_format="dummy" a shape's name
        ("qwen3-0.6b") will do as the model. Raises TypeError for an unknown option, hub.HubError
        for a model that cannot be had, and a ValueError or OSError for one that cannot be loaded.
        """
        config = engine_config(None if model is None else str(model), options)
        self._model_dir = find_model(config)
        self._loaded: EngineCore | None = load_core(config, self._model_dir)
        self._defaults = sampling_defaults(config.generation_config, self._model_dir)
        self._num_keys = 0
        self._outputs: dict[int, _Generated] = {}  # of requests that have not ended
        self._prepared: list[GrammarSpec] = []  # for requests that are being submitted
        self._fault: Exception | None = None  # what broke the engine: requests stay for ever
        self._tokenizer: Any = None

    # ---- one step at a time

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues a request and returns the key that step() names it by; with n > 1, the first of n
        consecutive keys, one for each sample.

        Raises what submissions.to_requests does, for a bad value or field.
        """
        with self._grammars_kept():
            samples = self._samples(prompt, sampling_params)
            self._submit(samples)
        return samples[0].key

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Runs one step: (key, token ids) of every request that ended, and the tokens sampled.

        Raises EngineFault when a request failed.
        """
        finished, num_tokens = self._step()
        return [(record.key, output.token_ids) for record, output in finished], num_tokens

    def is_finished(self) -> bool:
        return not self._core.has_work

    # ---- many requests to their end

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Runs prompts (texts or token ids) to their end: {"text", "token_ids"} of each, in order;
        with n > 1 it is the first sample's, and "samples" has the same of each sample.
        "logprobs" and "prompt_logprobs", where asked for, have a plan.TokenLogprobs for each token
        (None for the prompt's first).

        One SamplingParams serves all prompts, a list has one for each. A flat list of ints is one
        prompt. "text" is "" when the model folder has no tokenizer. All prompts are checked before
        the first is run. Once the engine is broken, raises what broke it (ranks.children.RankLost).
        """
        if self._fault is not None:
            raise self._fault
        if not self.is_finished():
            raise RuntimeError("generate: requests are pending; step() until is_finished() first")
        inputs = prompt_list(prompts)
        params = params_list(sampling_params, len(inputs))
        with self._grammars_kept():
            prompt_samples = [self._samples(*each) for each in zip(inputs, params, strict=True)]
            results = self._run(list(itertools.chain.from_iterable(prompt_samples)), use_tqdm)
        return [
            self._result([results[sample.key] for sample in samples], each)
            for samples, each in zip(prompt_samples, params, strict=True)
        ]

    @property
    def info(self) -> RunnerInfo:
        """The limits of the loaded model."""
        return self._core.info

    def stats(self) -> Stats:
        return self._core.stats()

    def close(self) -> None:
        """Frees the model and the KV cache; idempotent. Nothing else may be called afterwards."""
        core, self._loaded = self._loaded, None
        if core is not None:
            core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside

    @property
    def _core(self) -> EngineCore:
        if self._loaded is None:
            raise RuntimeError("the LLM is closed")
        return self._loaded

    def _samples(self, prompt: Prompt, sampling_params: SamplingParams | None) -> list[Request]:
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise refusal("sampling_params", "SamplingParams", params)
        if params.stop_strings:
            raise Unsupported(
                "stop: stop strings are matched by the client; LLM takes stop_token_ids",
                field="stop",
            )
        token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt_ids(prompt)
        submission = engine_pb2.Submission(sampling=to_proto(params))
        for text in params.bad_word_texts:
            word = self._load_tokenizer().encode(text, add_special_tokens=False)
            submission.sampling.bad_words.add(token_ids=word)
        samples = to_requests(
            submission,
            token_ids=token_ids,
            key=self._num_keys,
            info=self.info,
            random_seed=secrets.randbits(64),
            defaults=self._defaults,
        )
        self._num_keys += len(samples)
        if (grammar := samples[0].sampling.grammar) is not None:
            self._prepare_grammar(grammar)
        return samples

    @contextlib.contextmanager
    def _grammars_kept(self) -> Iterator[None]:
        """What is prepared inside is there when its request is submitted, which then keeps it."""
        try:
            yield
        finally:
            for spec in self._prepared:
                self._core.forget_grammar(spec)
            self._prepared.clear()

    def _prepare_grammar(self, spec: GrammarSpec) -> None:
        self._prepared.append(spec)
        try:
            self._core.prepare_grammar(spec).result()
        except GrammarError as error:
            raise refusal_of(
                spec,
                str(error),
                has_vocabulary=not isinstance(error, VocabularyError),
                has_room=not isinstance(error, GrammarsFullError),
            ) from None

    def _submit(self, requests: list[Request]) -> None:
        with uninterrupted():
            for request in requests:
                self._outputs[request.key] = _Generated()
                self._core.submit(request)

    def _run(
        self, requests: list[Request], use_tqdm: bool
    ) -> dict[int, tuple[FinishedRecord, _Generated]]:
        """Runs requests to their end, or cancels all; how each has ended, by key."""
        results: dict[int, tuple[FinishedRecord, _Generated]] = {}
        try:
            self._submit(requests)
            with tqdm(total=len(requests), desc="generating", disable=not use_tqdm) as progress:
                while not self.is_finished():
                    finished, _ = self._step()
                    results.update((ended[0].key, ended) for ended in finished)
                    progress.update(len(finished))
        except BaseException:  # Ctrl-C too: the next call finds an idle engine
            try:
                with uninterrupted():
                    self._cancel_all()
            except Exception as fault:  # a broken engine's second one must not hide the first
                self._fault = fault
            raise
        return results

    def _step(self) -> tuple[list[tuple[FinishedRecord, _Generated]], int]:
        with uninterrupted():
            record = self._core.step()
            outputs = self._outputs
            for key, token_id in zip(record.keys, record.token_ids, strict=True):
                outputs[key].token_ids.append(token_id)
            for key, entry in zip(record.keys, record.logprobs, strict=bool(record.logprobs)):
                outputs[key].logprobs.append(entry)
            for piece in record.prompt_logprobs:
                outputs[piece.key].prompt_logprobs += piece.logprobs
            finished = [(ended, self._outputs.pop(ended.key)) for ended in record.finished]
        for ended, _ in finished:
            if ended.reason == FinishReason.ERROR:
                raise EngineFault(ended.message)
        return finished, len(record.token_ids)

    def _cancel_all(self) -> None:
        self._core.finish(list(self._outputs), FinishReason.CANCELLED)
        while self._core.has_work:
            self._core.step()
        self._outputs.clear()

    def _encode(self, text: str) -> list[int]:
        text = check_text("prompt", text)
        token_ids: list[int] = self._load_tokenizer().encode(text)
        return token_ids

    def _result(
        self, ended: list[tuple[FinishedRecord, _Generated]], params: SamplingParams
    ) -> dict[str, Any]:
        """What generate() gives for a prompt whose samples have ended."""
        samples: list[dict[str, Any]] = []
        for record, output in ended:
            text = self._decode(record, output.token_ids, params)
            samples.append({"text": text, "token_ids": output.token_ids})
            if params.logprobs is not None:
                samples[-1]["logprobs"] = output.logprobs
        if params.prompt_logprobs is not None:
            samples[0]["prompt_logprobs"] = [None, *ended[0][1].prompt_logprobs]
        return samples[0] if len(samples) == 1 else {**samples[0], "samples": samples}

    def _decode(self, record: FinishedRecord, token_ids: list[int], params: SamplingParams) -> str:
        """The text of an output; of the token that ended it only with include_stop."""
        if not self._has_tokenizer():
            return ""
        if record.stop_token_id is not None and not params.include_stop:
            token_ids = token_ids[:-1]
        text: str = self._load_tokenizer().decode(
            token_ids, skip_special_tokens=params.skip_special_tokens
        )
        return text

    def _has_tokenizer(self) -> bool:
        from millstream import hub

        return self._model_dir is not None and hub.has_tokenizer(self._model_dir)

    def _load_tokenizer(self) -> Any:
        """transformers' tokenizer of the model; loaded when text is first needed."""
        if self._tokenizer is None:
            if not self._has_tokenizer():
                raise Unsupported("prompt: this model has no tokenizer; give token ids, not text")
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._model_dir)
        return self._tokenizer
