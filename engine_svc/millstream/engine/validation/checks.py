"""What validation raises, worded alike: the field first, then what it takes, then what came."""

from __future__ import annotations

from collections.abc import Collection

from millstream.engine.plan import RunnerInfo
from millstream.rpc.errors import InvalidArgument, PromptTooLong, Unsupported


def invalid(field: str, wanted: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{field}: {wanted}, not {value}", field=field)


def unsupported(field: str, why: str) -> Unsupported:
    return Unsupported(f"{field}: not supported: {why}", field=field)


def check_prompt_length(count: int, max_model_len: int) -> None:
    """Raises PromptTooLong where no room is left for output."""
    if count >= max_model_len:
        raise PromptTooLong(
            f"token_ids: {count} ids leave no room for output: prompt and output together have at "
            f"most {max_model_len} tokens (max_model_len)",
            field="token_ids",
        )


def check_vocabulary(field: str, token_ids: Collection[int], info: RunnerInfo) -> None:
    """Raises InvalidArgument for the first id that the model does not have."""
    if token_ids and max(token_ids) >= info.vocab_size:
        index, bad = next(pair for pair in enumerate(token_ids) if pair[1] >= info.vocab_size)
        raise InvalidArgument(
            f"{field}: ids from 0 to {info.vocab_size - 1}, not {bad} (at index {index})",
            field=field,
        )
