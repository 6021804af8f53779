"""Fields of request messages, read off their descriptors, and values that try each of them.

A field is named by its path ("submit.sampling.temperature", a map's by "logit_bias.key" and
".value"); values are what JSON has, as grpcurl takes it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from millstream.rpc.errors import InvalidArgument, MillstreamError

MANY = 5000  # entries of a repeated field
LONG = 200_000  # characters of a string

Json = Any
Kind = type[MillstreamError]
_INTEGERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a field takes. Of a value that it does not take, the error is of type `kind` (or one of
    what `kind` says of the value) and names one of `fields`, or, if there are none, the field
    itself. A value that it takes may still bring an error of type `later`."""

    good: Callable[[Json], bool]
    kind: Kind | Callable[[Json], Kind | tuple[Kind, ...]] = InvalidArgument
    fields: tuple[str, ...] = ()
    more: Sequence[Json] = ()  # values besides those of its type
    later: Kind | None = None

    def kinds_of(self, value: Json) -> tuple[Kind, ...]:
        kinds = self.kind if isinstance(self.kind, type) else self.kind(value)
        return kinds if isinstance(kinds, tuple) else (kinds,)


def anything(value: Json) -> bool:
    return True


def within(low: float, high: float, *, above: bool = False) -> Callable[[Json], bool]:
    """Finite numbers from `low` (or, with `above`, beyond it) to `high`."""

    def good(value: Json) -> bool:
        number = float(value)
        return math.isfinite(number) and low <= number <= high and not (above and number == low)

    return good


def each(good: Callable[[Json], bool], *, most: int = MANY) -> Callable[[Json], bool]:
    """Lists of at most so many, all of whose entries are good."""
    return lambda value: len(value) <= most and all(map(good, value))


def shorter_than(length: int) -> Callable[[Json], bool]:
    return lambda value: len(value) < length


def fields_of(message: Descriptor, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field of a message and of those inside it, by path; none twice, also where a message
    type holds itself."""
    for field in message.fields:
        path = f"{prefix}{field.name}"
        yield path, field
        if field.message_type is not None and f".{field.name}." not in f".{prefix}":
            yield from fields_of(field.message_type, f"{path}.")


def values_of(field: FieldDescriptor) -> list[Json]:
    """Usual, extreme and impossible values of a field's type, all of which JSON can carry."""
    if is_map(field):
        key, value = field.message_type.fields
        keys = {str(one): 1.0 for one in _single_values(key)}
        return [{}, *({name: 1.0} for name in keys), *({"1": v} for v in _single_values(value))]
    singles = _single_values(field)
    if not field.is_repeated:
        return singles
    return [[], *([one] for one in singles), [singles[0]] * MANY]


def wrong_types_of(field: FieldDescriptor) -> list[Json]:
    """What no JSON reader takes for the field: another type, or a number that does not fit."""
    if is_map(field):
        return ["x", 1, [1], {"x": 1.0}, {"-1": 1.0}, {"1": "warm"}, {"1": {}}]
    if field.is_repeated:
        return [True, 1.5, *([one] for one in _wrong_singles(field))]
    return _wrong_singles(field)


def placed(base: Json, path: str, value: Json) -> Json:
    """A copy of a message with a field set, in the first entry of each repeated field above it."""
    message = copy.deepcopy(base)
    *above, name = path.split(".")
    inner = message
    for step in above:
        inner = inner[step]
        inner = inner[0] if isinstance(inner, list) else inner
    inner[name] = value
    return message


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _single_values(field: FieldDescriptor) -> list[Json]:
    match field.type:
        case FieldDescriptor.TYPE_FLOAT:
            return ["NaN", "Infinity", "-Infinity", 3.4e38, -3.4e38, -1.0, 0.0, 1e-40, 1.0]
        case FieldDescriptor.TYPE_BOOL:
            return [False, True]
        case FieldDescriptor.TYPE_STRING:
            return ["", "x", "\0", "é" * LONG]
        case FieldDescriptor.TYPE_MESSAGE:
            return [{}]
        case kind if kind in _INTEGERS:
            low, high = _INTEGERS[kind]
            return list(dict.fromkeys([low, max(low, -1), 0, 1, high]))
    raise AssertionError(f"{field.full_name}: no values for a field of this type yet")


def _wrong_singles(field: FieldDescriptor) -> list[Json]:
    match field.type:
        case FieldDescriptor.TYPE_FLOAT:
            return ["warm", {}, [1.0]]
        case FieldDescriptor.TYPE_BOOL:
            return ["yes", 1, {}]
        case FieldDescriptor.TYPE_STRING:
            return [1, True, {}]
        case FieldDescriptor.TYPE_MESSAGE:
            return ["x", 1, {"no_such_field": 1}]
        case _:
            low, high = _INTEGERS[field.type]
            return ["x", 1.5, True, {}, low - 1, high + 1, "NaN"]
