"""How much a request may make an engine do: by it, requests are spread over several engines."""

from __future__ import annotations

from millstream.rpc.sampling_params import SamplingParams

# Of an answer whose length nobody bounded.
_USUAL_TOKENS = 512


def most_tokens(prompt_tokens: int, params: SamplingParams) -> int:
    """Of the prompt and one answer, as far as is known before it is there."""
    answer = params.max_tokens
    return prompt_tokens + (_USUAL_TOKENS if answer is None else answer)
