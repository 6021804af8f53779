"""Values that come from a Python user: each check returns what protobuf can carry, or raises
InvalidArgument (a ValueError) whose message starts with the argument's name."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from millstream.rpc.errors import InvalidArgument

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
A_TOKEN_ID = "a token id of 0 or more, below 2**32"


def refusal(name: str, wanted: str, value: object, *, field: str | None = None) -> InvalidArgument:
    """`field`: the argument, where `name` is a place in it (`prompt[3]`)."""
    try:
        shown = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        shown = f"that {type(value).__name__}"
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return InvalidArgument(f"{name}: {wanted}, not {shown}", field=field or name)


def check_float(name: str, value: object) -> float:
    """Any number, NaN and infinity too: ranges are the engine's."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refusal(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise refusal(name, "a number of a float's size", value) from None


def check_int(name: str, value: object, low: int, high: int, *, wanted: str | None = None) -> int:
    """`wanted`: what to ask for instead, where the value's own range is another than what can be
    carried."""
    if type(value) is not int and (  # asking an abstract class takes ten times as long
        isinstance(value, bool) or not isinstance(value, numbers.Integral)
    ):
        raise refusal(name, "a whole number", value)
    number = int(value)
    if not low <= number <= high:
        raise refusal(name, wanted or f"from {low} to {high}", value)
    return number


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise refusal(name, "True or False", value)
    return value


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}: a string, not {type(value).__name__}", field=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name}: character {error.start} is a lone surrogate, which no UTF-8 text can have",
            field=name,
        ) from None
    return value


def check_list(name: str, value: object, wanted: str) -> Sequence[Any]:
    """A list, a tuple or the like; a text is none."""
    if type(value) is list or type(value) is tuple:
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise refusal(name, wanted, value)
    return value


def check_ids(name: str, value: object) -> Sequence[int]:
    """Token ids; an error names the position of a bad one."""
    token_ids = check_list(name, value, "a list of token ids")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= UINT32_MAX:
        return token_ids  # the loop would find nothing, at 10 times the cost
    for i, token_id in enumerate(token_ids):
        if type(token_id) is int and 0 <= token_id <= UINT32_MAX:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
            raise refusal(f"{name}[{i}]", "a token id", token_id, field=name)
        if not 0 <= int(token_id) <= UINT32_MAX:
            raise refusal(f"{name}[{i}]", A_TOKEN_ID, token_id, field=name)
    return token_ids
