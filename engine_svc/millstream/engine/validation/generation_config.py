"""Sampling defaults of a model: what its generation_config.json says of fields left unset.

Read by the front end, and by LLM in process, so that every request meets the same defaults. Of the
file's other keys, `do_sample` among them, nothing is taken: a request that wants to be greedy says
temperature 0. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from millstream.engine.model_files.config_values import ModelConfigError, shortened
from millstream.engine.model_files.model_config import GENERATION_CONFIG_FILE, read_json
from millstream.engine.validation.sampling import check_scalars
from millstream.rpc.errors import InvalidArgument
from millstream.v1 import engine_pb2

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_WHOLE = ("top_k",)


def sampling_defaults(generation_config: str, model_dir: Path | None) -> engine_pb2.SamplingParams:
    """The fields that the file sets; none with generation_config "none", or without a file. Raises
    ModelConfigError for a file that cannot be read and for a value out of its field's range."""
    defaults = engine_pb2.SamplingParams()
    file = None if model_dir is None else model_dir / GENERATION_CONFIG_FILE
    if generation_config == "none" or file is None or not file.exists():
        return defaults
    raw = read_json(file)
    for name in (*_NUMBERS, *_WHOLE):
        value = raw.get(name)
        if value is None:
            continue
        kind = int if name in _WHOLE else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or abs(value) >= 2**31:
            raise _refusal(f"{name}={shortened(value)}")
        setattr(defaults, name, value)
    try:
        check_scalars(defaults)
    except InvalidArgument as error:
        raise _refusal(error.message.removeprefix("sampling.")) from None
    return defaults


def _refusal(what: str) -> ModelConfigError:
    return ModelConfigError(
        f"{GENERATION_CONFIG_FILE}: {what} cannot be the default of a request; "
        "--generation-config none ignores the file"
    )
