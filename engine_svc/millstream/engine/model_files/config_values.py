"""Typed reading of a config.json's values; each error names the key and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ModelConfigError(ValueError):
    """A config.json that cannot be served; the message names the key and its value."""


def unsupported(key: str, value: Any, supported: str) -> ModelConfigError:
    """The error for a value that is known to be out of reach."""
    return ModelConfigError(f"{key}={shortened(value)} is not supported; supported: {supported}")


def shortened(value: Any) -> str:
    """The value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def positive_int(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{key}={value!r} must be a positive integer")
    return value


def positive_number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ModelConfigError(f"{key}={value!r} must be a positive number")


def boolean(values: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelConfigError(f"{key}={value!r} must be true or false")
    return value
