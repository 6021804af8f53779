"""Several engines of one machine: which GPUs or how many cores each has, and on which port."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.client.processes import LaunchError

_DEVICE = re.compile(r"nvidia(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one of the engines is started with, besides what all have."""

    options: Mapping[str, Any]  # keywords for engine_arguments
    environment: Mapping[str, str]  # beside the parent's
    port: int


def gpus_of(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that processes with this environment would see, as CUDA_VISIBLE_DEVICES has them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
    found = (_DEVICE.fullmatch(path.name) for path in devices.glob("nvidia*"))
    return sorted((match[1] for match in found if match), key=int)


def plan_replicas(
    count: int, options: Mapping[str, Any], *, first_port: int, gpus: Sequence[str]
) -> list[Replica]:
    """`count` engines on consecutive ports (0: on any free ones). Where there are GPUs, each has
    its own, as many as it has ranks; elsewhere they share the cores. Raises LaunchError."""
    ports = [first_port + index if first_port else 0 for index in range(count)]
    if ports[-1] > 65535:
        raise LaunchError(f"replicas: {count} ports from {first_port} on are more than there are")
    if count == 1:
        return [Replica(options=options, environment={}, port=first_port)]
    ranks = options.get("tensor_parallel_size", 1)
    if gpus and options.get("device") != "cpu":
        if len(gpus) < count * ranks:
            raise LaunchError(
                f"replicas: {count} engines need {count * ranks} GPUs, and there are {len(gpus)}"
            )
        shares = [gpus[index * ranks : (index + 1) * ranks] for index in range(count)]
        return [
            Replica(options=options, environment={"CUDA_VISIBLE_DEVICES": ",".join(own)}, port=port)
            for own, port in zip(shares, ports, strict=True)
        ]
    threads = max((os.cpu_count() or 1) // (count * ranks), 1)
    options = {"threads": threads, **options}
    return [Replica(options=options, environment={}, port=port) for port in ports]
