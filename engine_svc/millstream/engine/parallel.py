"""The processes that share one model. So far there is one."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.engine.hardware import LoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """This process's place among those that each hold a shard of the model."""

    rank: int = 0
    size: int = 1


def join_process_group(tensor_parallel_size: int) -> ProcessGroup:
    """The group of this process. Raises LoadError for a size that is not supported."""
    if tensor_parallel_size != 1:
        raise LoadError(
            f"tensor_parallel_size: only 1 is supported so far, not {tensor_parallel_size}"
        )
    return ProcessGroup()
