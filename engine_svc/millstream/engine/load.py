"""From settings to a core that can step: where the model lies, which runner carries plans out.

Imports no torch: the front end asks where the model lies; the core process and LLM load.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from millstream import hub
from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.model_files.shapes import SHAPE_NAMES
from millstream.engine.plan import Runner

_RUNNERS = {
    "model": "millstream.engine.runner:create",
    "instant": "millstream.engine.instant_runner:create",
}


def find_model(config: EngineConfig) -> Path | None:
    """The model's folder; None where none is needed. Downloads it if need be, which may block for
    minutes. Raises hub.HubError."""
    if config.load_format == "dummy" and config.model in SHAPE_NAMES:
        return None
    if config.runner != "model" and config.model is None:
        return None
    return hub.resolve(config.model)


def load_core(
    config: EngineConfig, model_dir: Path | None, on_lost: Callable[[str], None] | None = None
) -> EngineCore:
    """Loads the model and puts a scheduler around it. Raises a ValueError or OSError with one clear
    line for what the user can mend.

    on_lost: called on another thread, with the reason, when one of several ranks has ended, even
    while nobody steps; the core is of no use then, and what waits for a step may wait for ever.
    Without it, steps raise RankLost.
    """
    if config.runner == "model" and config.tensor_parallel_size > 1:
        runner = _over_ranks(config, model_dir, on_lost)
    else:
        runner = _find_runner(config.runner)(config, model_dir)
    return EngineCore(runner, prefix_caching=config.prefix_caching, clock=time.monotonic)


def _over_ranks(
    config: EngineConfig, model_dir: Path | None, on_lost: Callable[[str], None] | None
) -> Runner:
    # By their names, as other runners: the front end, which imports us, has no torch.
    create_runner = importlib.import_module("millstream.engine.ranks.children").create_runner
    watched = importlib.import_module("millstream.engine.in_process.watched_runner").watched
    runner: Runner
    if on_lost is not None:
        runner = create_runner(config, model_dir, on_lost)
    else:
        runner = watched(lambda on_lost: create_runner(config, model_dir, on_lost))
    return runner


def _find_runner(name: str) -> Callable[[EngineConfig, Path | None], Runner]:
    """The factory of a runner: "model", "instant" or "module:function"."""
    module, _, function = _RUNNERS.get(name, name).partition(":")
    if not function:
        raise ValueError(f"runner: model, instant or module:function, not {name!r}")
    if name not in _RUNNERS:
        sys.path.append(os.getcwd())  # where the user's own modules are
    try:
        found: Callable[[EngineConfig, Path | None], Runner]
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"runner {name}: {error}") from error
    return found
