"""Engine records as protocol messages."""

from __future__ import annotations

import functools

from google.rpc import status_pb2

from millstream.engine.config import EngineConfig
from millstream.engine.plan import RunnerInfo
from millstream.engine.records import FinishedRecord, Stats, handle_of
from millstream.engine.request import FinishReason
from millstream.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    MillstreamError,
    to_status,
)
from millstream.rpc.version import API_VERSION, millstream_version
from millstream.v1 import engine_pb2


def engine_info(
    info: RunnerInfo,
    config: EngineConfig,
    *,
    model: str,
    tokenizer_fingerprint: str,
    max_message_bytes: int,
) -> engine_pb2.EngineInfo:
    return engine_pb2.EngineInfo(
        api_version=API_VERSION,
        model=model,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
        limits=engine_pb2.EngineLimits(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_message_bytes=max_message_bytes,
        ),
        server_version=millstream_version(),
    )


def finished(record: FinishedRecord) -> engine_pb2.Finished:
    reason = FinishReason(record.reason)
    message = engine_pb2.Finished(
        handle=handle_of(record.key),
        reason=engine_pb2.FinishReason.ValueType(reason),
        stop_token_id=record.stop_token_id,
        usage=engine_pb2.Usage(
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
        ),
        timings=engine_pb2.Timings(
            queue_s=record.queue_s,
            prefill_s=record.prefill_s,
            first_token_s=record.first_token_s,
            decode_s=record.decode_s,
            preemptions=record.preemptions,
        ),
    )
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        message.status.CopyFrom(_status(reason, record.message))
    return message


def stats(gauges: Stats, *, open_streams: int, messages_sent: int) -> engine_pb2.GetStatsResponse:
    return engine_pb2.GetStatsResponse(
        num_requests_running=gauges.num_requests_running,
        num_requests_waiting=gauges.num_requests_waiting,
        kv_blocks_used=gauges.kv_blocks_used,
        kv_blocks_total=gauges.kv_blocks_total,
        open_streams=open_streams,
        steps=gauges.steps,
        prompt_tokens=gauges.prompt_tokens,
        generation_tokens=gauges.generation_tokens,
        prefix_cache_queries=gauges.prefix_cache_queries,
        prefix_cache_hits=gauges.prefix_cache_hits,
        num_preemptions=gauges.num_preemptions,
        messages_sent=messages_sent,
        requests_finished=gauges.requests_finished,
    )


@functools.lru_cache(maxsize=64)  # a disconnect may end thousands alike
def _status(reason: FinishReason, message: str) -> status_pb2.Status:
    error: MillstreamError
    match reason:
        case FinishReason.CANCELLED:
            error = Cancelled("the client cancelled the request")
        case FinishReason.DEADLINE:
            error = DeadlineExceeded("the request's timeout_ms passed")
        case FinishReason.SHUTDOWN:
            error = EngineUnavailable("the engine is stopping")
        case _:
            error = EngineFault(message or "the request failed")
    return to_status(error)
