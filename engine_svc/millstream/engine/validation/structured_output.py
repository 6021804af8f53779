"""structured_output of the wire as a GrammarSpec, and back; what refuses it."""

from __future__ import annotations

import json

from millstream.engine.plan import RunnerInfo
from millstream.engine.request import GrammarKind, GrammarSpec
from millstream.engine.validation.checks import invalid
from millstream.rpc.errors import InvalidArgument, MillstreamError, NoTokenizer, QueueFull
from millstream.v1 import engine_pb2

MAX_GRAMMAR_CHARS = 1 << 17  # Accepted tells them of each sample
_ROOM_AFTER_S = 1.0  # a guess: when some request that follows a large grammar has ended


def resolve_grammar(params: engine_pb2.SamplingParams, info: RunnerInfo) -> GrammarSpec | None:
    """What the output must follow; compiling it may still refuse it. Raises InvalidArgument, or
    NoTokenizer if this engine follows no grammars."""
    name = params.WhichOneof("structured_output")
    if name is None or (name == "json_object" and not params.json_object):
        return None
    kind = GrammarKind[name.upper()]
    field = _field(kind)
    match kind:
        case GrammarKind.CHOICE:
            choices = list(params.choice.values)
            if not choices:
                raise InvalidArgument(f"{field}: at least one string, not none", field=field)
            size, text = sum(map(len, choices)) + len(choices), json.dumps(choices)
        case GrammarKind.JSON_OBJECT:
            size, text = 0, ""
        case _:
            text = getattr(params, name)
            size = len(text)
    if size > MAX_GRAMMAR_CHARS:
        raise invalid(field, f"at most {MAX_GRAMMAR_CHARS} characters", size)
    if not info.structured_output:
        raise NoTokenizer(
            f"{field}: this engine's model has no tokenizer.json, or no EOS id, for structured "
            "output to use",
            field=field,
        )
    return GrammarSpec(kind=kind, text=text)


def set_grammar(params: engine_pb2.SamplingParams, spec: GrammarSpec | None) -> None:
    """Writes what resolve_grammar() read."""
    if spec is None:
        return
    match spec.kind:
        case GrammarKind.CHOICE:
            params.choice.values.extend(json.loads(spec.text))
        case GrammarKind.JSON_OBJECT:
            params.json_object = True
        case _:
            setattr(params, spec.kind.name.lower(), spec.text)


def refusal_of(
    spec: GrammarSpec, problem: str, *, has_vocabulary: bool = True, has_room: bool = True
) -> MillstreamError:
    """The error of a request whose grammar cannot be compiled, or cannot be kept now."""
    field = _field(spec.kind)
    if not has_room:
        return QueueFull(f"{field}: {problem}", field=field, retry_after_s=_ROOM_AFTER_S)
    kind = InvalidArgument if has_vocabulary else NoTokenizer
    return kind(f"{field}: {problem}", field=field)


def _field(kind: GrammarKind) -> str:
    return f"sampling.{kind.name.lower()}"
