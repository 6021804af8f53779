"""A line in the log of what the engine does, while it does something."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from millstream.engine.frontend.supervisor import Supervisor
from millstream.rpc.errors import EngineUnavailable

logger = logging.getLogger(__name__)

STATS_LOG_INTERVAL_S = 10.0


async def log_stats(
    core: Supervisor, num_tokens: Callable[[], int], num_streams: Callable[[], int]
) -> None:
    """Logs each STATS_LOG_INTERVAL_S while there is work, until the core is gone. `num_tokens` have
    been generated so far."""
    tokens_logged = 0
    while True:
        await asyncio.sleep(STATS_LOG_INTERVAL_S)
        tokens = num_tokens() - tokens_logged
        tokens_logged += tokens
        if not tokens and not core.num_live:
            continue
        try:
            stats = await core.stats()
        except EngineUnavailable:
            return
        logger.info(
            "running %d, waiting %d, KV blocks %d/%d, %.0f tokens/s, streams %d",
            stats.num_requests_running,
            stats.num_requests_waiting,
            stats.kv_blocks_used,
            stats.kv_blocks_total,
            tokens / STATS_LOG_INTERVAL_S,
            num_streams(),
        )
