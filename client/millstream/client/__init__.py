"""The client of Millstream's two services. Needs neither torch nor transformers nor tokenizers."""

from __future__ import annotations

import millstream.client.fork_support  # noqa: F401
from millstream.client.aio import AsyncClient
from millstream.client.client import Client
from millstream.client.launch import alaunch, launch
from millstream.client.types import (
    Delta,
    FinishReason,
    Health,
    Logprob,
    Output,
    ServicesHealth,
    ServicesInfo,
    Timings,
    Usage,
)
from millstream.rpc.sampling_params import SamplingParams

__all__ = [
    "AsyncClient",
    "Client",
    "Delta",
    "FinishReason",
    "Health",
    "Logprob",
    "Output",
    "SamplingParams",
    "ServicesHealth",
    "ServicesInfo",
    "Timings",
    "Usage",
    "alaunch",
    "launch",
]
