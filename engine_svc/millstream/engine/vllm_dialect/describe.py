"""What the engine says of itself in this protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from smg_grpc_proto import vllm_engine_pb2 as vllm

from millstream.engine.plan import RunnerInfo
from millstream.rpc.version import millstream_version
from millstream.v1 import engine_pb2

SERVER_TYPE = "millstream"
# Throughput is an average over at least so long.
MIN_RATE_WINDOW_S = 0.5


def model_info(
    info: RunnerInfo, *, name: str, model_dir: Path | None, defaults: engine_pb2.SamplingParams
) -> vllm.GetModelInfoResponse:
    """The model. A gateway on this machine reads the tokenizer at its path; any other one asks
    GetTokenizer. It fills the defaults in where a user sets nothing."""
    sampling = MessageToDict(defaults, preserving_proto_field_name=True)
    config = _read_config(model_dir)
    path = "" if model_dir is None else str(model_dir)
    return vllm.GetModelInfoResponse(
        model_path=path or name,
        is_generation=True,
        max_context_length=info.max_model_len,
        vocab_size=info.vocab_size,
        served_model_name=name,
        tokenizer_path=path,
        model_type=str(config.get("model_type", "")),
        architectures=[str(item) for item in config.get("architectures") or []],
        eos_token_ids=info.eos_token_ids,
        pad_token_id=_token_id(config.get("pad_token_id")),
        bos_token_id=_token_id(config.get("bos_token_id")),
        max_req_input_len=info.max_model_len - 1,
        default_sampling_params_json=json.dumps(sampling) if sampling else "",
    )


def server_info(
    info: RunnerInfo, stats: engine_pb2.GetStatsResponse, *, uptime_s: float, last_request: float
) -> vllm.GetServerInfoResponse:
    """The process. last_request: in seconds since the epoch; 0 before the first."""
    return vllm.GetServerInfoResponse(
        active_requests=stats.num_requests_running + stats.num_requests_waiting,
        last_receive_timestamp=last_request,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype="auto",
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        constrained_decoding_start="first_token",
    )


class LoadReports:
    """GetLoads' answers; the throughput is that since an earlier one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = (clock(), 0)  # when there were so many generated tokens
        self._last_rate = 0.0

    def report(self, info: RunnerInfo, stats: engine_pb2.GetStatsResponse) -> vllm.GetLoadsResponse:
        running, waiting = stats.num_requests_running, stats.num_requests_waiting
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        queries = stats.prefix_cache_queries
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=stats.kv_blocks_used * info.block_size,
            max_total_num_tokens=stats.kv_blocks_total * info.block_size,
            token_usage=usage,
            gen_throughput=self._rate(stats.generation_tokens),
            cache_hit_rate=stats.prefix_cache_hits / queries if queries else 0.0,
            utilization=min(1.0, running / info.max_num_seqs),
            max_running_requests=info.max_num_seqs,
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=millstream_version(),
            dp_rank_count=1,
            loads=[load],
        )

    def _rate(self, tokens: int) -> float:
        now, (since, tokens_then) = self._clock(), self._since
        if now - since >= MIN_RATE_WINDOW_S:
            self._last_rate = (tokens - tokens_then) / (now - since)
            self._since = (now, tokens)
        return self._last_rate


def _read_config(model_dir: Path | None) -> dict[str, Any]:
    if model_dir is None:
        return {}
    config = json.loads((model_dir / "config.json").read_text())
    return config if isinstance(config, dict) else {}


def _token_id(value: object) -> int:
    """A token id of config.json; 0 where it has none, as the protocol wants it."""
    return value if isinstance(value, int) and value >= 0 else 0
