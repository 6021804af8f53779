"""What a detokenizer is told of the prompt, whoever opens it: the client, or the engine's front end
where a dialect wants stop strings of it."""

from __future__ import annotations

from collections.abc import Sequence

# So that the first token joins the prompt as it would in the whole text.
_CONTEXT_TOKENS = 8


def text_context(prompt_token_ids: Sequence[int]) -> Sequence[int]:
    """The last ids of a prompt, which the output's text goes on from."""
    return prompt_token_ids[-_CONTEXT_TOKENS:]
