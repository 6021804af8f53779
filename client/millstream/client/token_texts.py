"""The texts of the tokens that log probabilities name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from millstream.client.services import Services
from millstream.client.types import Logprob, Output

_CALL_IDS = 4096  # in one Decode call
_MOST_KNOWN = 1 << 18  # texts that are kept; then it starts anew


class TokenTexts:
    """The texts of single tokens, asked for once each. Belongs to its services' event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: dict[int, str] = {}

    async def add_to(self, output: Output) -> Output:
        """The same with a text for each token of log probabilities that the tokenizer knows."""
        samples = output.samples
        wanted = {i for sample in samples for entry in _entries(sample) for i in _ids_of(entry)}
        if not wanted:
            return output
        await self._learn(wanted)
        first, *others = [_with_texts(sample, self._known) for sample in samples]
        return replace(first, other_samples=others)

    async def _learn(self, token_ids: set[int]) -> None:
        vocab_size = (await self._services.text_stream()).info.vocab_size
        if len(self._known) > _MOST_KNOWN:
            self._known = {}
        new = sorted(i for i in token_ids if i not in self._known and i < vocab_size)
        for start in range(0, len(new), _CALL_IDS):
            ids = new[start : start + _CALL_IDS]
            texts = await self._services.decode([[i] for i in ids], skip_special_tokens=False)
            self._known.update(zip(ids, texts, strict=True))


def _entries(output: Output) -> Iterator[Logprob]:
    yield from output.logprobs or ()
    yield from filter(None, output.prompt_logprobs or ())


def _ids_of(entry: Logprob) -> Iterator[int]:
    yield entry.token_id
    for other in entry.top:
        yield other.token_id


def _with_texts(output: Output, texts: Mapping[int, str]) -> Output:
    def with_text(entry: Logprob) -> Logprob:
        return replace(
            entry, text=texts.get(entry.token_id), top=[with_text(other) for other in entry.top]
        )

    logprobs, prompt = output.logprobs, output.prompt_logprobs
    return replace(
        output,
        other_samples=[],
        logprobs=None if logprobs is None else [with_text(entry) for entry in logprobs],
        prompt_logprobs=None
        if prompt is None
        else [None if entry is None else with_text(entry) for entry in prompt],
    )
