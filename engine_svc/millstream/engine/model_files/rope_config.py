"""Reads the rotary position embedding's keys of a config.json, in both of their layouts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.engine.model_files.config_values import (
    ModelConfigError,
    boolean,
    positive_int,
    positive_number,
    shortened,
    unsupported,
)

_ROPE_THETA = 10000.0  # transformers' class default of both families


class RopeType(enum.Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields after `factor` are for the types named beside them."""

    type: RopeType = RopeType.DEFAULT
    theta: float
    # Positions that the model was trained on before any scaling.
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: computed from factor (and the mscales)
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


_ROPE_KEYS: Mapping[RopeType, frozenset[str]] = {
    RopeType.DEFAULT: frozenset(),
    RopeType.LINEAR: frozenset({"factor"}),
    RopeType.DYNAMIC: frozenset({"factor"}),
    RopeType.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    RopeType.YARN: frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast"}
        | {"beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
}
# Without these a type means nothing (transformers raises KeyError).
_ROPE_REQUIRED: Mapping[RopeType, tuple[str, ...]] = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.DYNAMIC: ("factor",),
    RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeType.YARN: ("factor",),
}


def parse_rope(values: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Both layouts: rope_parameters (transformers 5), rope_theta with rope_scaling (before).

    Where both speak they must agree. Without a theta it is transformers' class default.
    """
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    if old and new and old != new:
        raise ModelConfigError(f"rope_scaling={old!r} contradicts rope_parameters={new!r}")
    key = "rope_scaling" if old else "rope_parameters"
    given = old or new or {}
    if not isinstance(given, dict):
        raise ModelConfigError(f"{key}={given!r} must be an object")
    parameters = {f"{key}.{name}": value for name, value in given.items() if value is not None}

    rope_type = _pop_type(parameters, key)
    theta = parameters.pop(f"{key}.rope_theta", values.get("rope_theta"))
    if values.get("rope_theta") not in (None, theta):
        raise ModelConfigError(
            f"rope_theta={values['rope_theta']!r} contradicts {key}.rope_theta={theta!r}"
        )
    rotary_factor = parameters.pop(f"{key}.partial_rotary_factor", 1.0)
    if rotary_factor != 1.0:
        raise unsupported(f"{key}.partial_rotary_factor", rotary_factor, "1.0")
    for name, value in parameters.items():
        if name.removeprefix(f"{key}.") not in _ROPE_KEYS[rope_type]:
            raise ModelConfigError(
                f"{name}={shortened(value)} is unknown for rope_type={rope_type.value!r}"
            )
    for required in _ROPE_REQUIRED[rope_type]:
        if f"{key}.{required}" not in parameters:
            raise ModelConfigError(f"{key}.{required} is missing for rope_type={rope_type.value!r}")

    original_key, truncate_key = f"{key}.original_max_position_embeddings", f"{key}.truncate"
    parameters.setdefault(original_key, max_position_embeddings)
    return RopeConfig(
        type=rope_type,
        theta=positive_number({"rope_theta": theta}, "rope_theta", _ROPE_THETA),
        original_max_position=positive_int(parameters, original_key),
        truncate=boolean(parameters, truncate_key, True),
        **{
            name.removeprefix(f"{key}."): positive_number(parameters, name)
            for name in parameters
            if name not in (original_key, truncate_key)
        },
    )


def _pop_type(parameters: dict[str, Any], key: str) -> RopeType:
    """Takes the type out of parameters, in its old spelling and its new one."""
    names = [name for name in (f"{key}.rope_type", f"{key}.type") if name in parameters]
    values = [parameters.pop(name) for name in names]
    if len(values) == 2 and values[0] != values[1]:
        raise ModelConfigError(f"{names[0]}={values[0]!r} contradicts {names[1]}={values[1]!r}")
    if not values:
        return RopeType.DEFAULT
    try:
        return RopeType(values[0])
    except ValueError:
        supported = ", ".join(item.value for item in RopeType)
        raise unsupported(names[0], values[0], supported) from None
