"""What a step brought each stream: a StepRecord taken apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.engine.frontend import wire
from millstream.engine.plan import TokenLogprobs
from millstream.engine.records import StepRecord, handle_of, stream_of
from millstream.v1 import engine_pb2


@dataclass(slots=True)
class StepPart:
    """One stream's part of a step. Handles and token ids are parallel, a handle at most once."""

    handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[engine_pb2.Finished] = field(default_factory=list)
    # Parallel to token_ids, or empty when no request of the step asked.
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = field(default_factory=list)


def parts_of(step: StepRecord) -> dict[int, StepPart]:
    """By stream."""
    parts: dict[int, StepPart] = {}
    for key, token_id in zip(step.keys, step.token_ids, strict=True):
        number = stream_of(key)
        part = parts.get(number)
        if part is None:
            part = parts[number] = StepPart()
        part.handles.append(handle_of(key))
        part.token_ids.append(token_id)
    if step.logprobs:
        for key, entry in zip(step.keys, step.logprobs, strict=True):
            parts[stream_of(key)].logprobs.append(entry)
    for piece in step.prompt_logprobs:
        part = parts.setdefault(stream_of(piece.key), StepPart())
        part.prompt_logprobs.append((handle_of(piece.key), piece.logprobs))
    for record in step.finished:
        part = parts.setdefault(stream_of(record.key), StepPart())
        part.finished.append(wire.finished(record))
    return parts
