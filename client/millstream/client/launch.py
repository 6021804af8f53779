"""launch(): both services as subprocesses, a client for them, and their end, in one `with`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from millstream.client.aio import AsyncClient
from millstream.client.client import Client
from millstream.client.engine_stream import Observer
from millstream.client.processes import LaunchError, ServiceProcesses
from millstream.rpc.logs import LEVELS
from millstream.rpc.start import needs
from millstream.rpc.values import check_bool, check_float, refusal

_SERVER_FLAGS = {"drain_timeout_s": 5.0, "max_message_bytes": 0}  # both services have these
_TOKENIZER_FLAGS = (*_SERVER_FLAGS, "served_model_name")
# Of each extra, enough to know whether it is installed.
_LIBRARIES = {"engine": ("msgspec", "torch"), "tokenizer": ("tokenizers", "jinja2")}


@contextlib.contextmanager
def launch(
    model: str | None = None,
    *,
    tokenizer: bool = True,
    log_level: str | None = None,
    timeout_s: float | None = None,
    observer: Observer | None = None,
    **engine_flags: Any,
) -> Iterator[Client]:
    """Starts the services on free loopback ports, yields a Client, and stops both at the end.

    `model`: a folder or Hugging Face id; None: the embedded default model. `engine_flags`: flags of
    `millstream-engine` with underscores (max_num_seqs=64, prefix_caching=False). `log_level`: show
    the services' logs from that level on; None: show nothing. `timeout_s`: for the start. Raises
    LaunchError with the service's own reason, TypeError for an unknown flag, InvalidArgument.
    """
    with ServiceProcesses() as processes:
        engine, text = _start(processes, model, tokenizer, log_level, timeout_s, engine_flags)
        with Client(engine, text, observer=observer) as client:
            yield client


@contextlib.asynccontextmanager
async def alaunch(
    model: str | None = None,
    *,
    tokenizer: bool = True,
    log_level: str | None = None,
    timeout_s: float | None = None,
    observer: Observer | None = None,
    **engine_flags: Any,
) -> AsyncIterator[AsyncClient]:
    """`launch` for asyncio; yields an AsyncClient."""
    processes = ServiceProcesses()
    try:
        engine, text = await asyncio.to_thread(
            _start, processes, model, tokenizer, log_level, timeout_s, engine_flags
        )
        async with AsyncClient(engine, text, observer=observer) as client:
            yield client
    finally:
        await asyncio.to_thread(processes.stop)


def prefetch(model: str | None, engine_flags: Mapping[str, Any]) -> None:
    """Obtains the model's files, with their progress on stderr, before two services want them.

    Raises LaunchError.
    """
    only_shape = engine_flags.get("load_format") == "dummy"
    no_model = model is None and engine_flags.get("runner", "model") != "model"
    if only_shape or no_model:
        return
    hub: Any = import_service("millstream.hub")
    try:
        hub.resolve(model)
    except hub.HubError as error:
        raise LaunchError(str(error)) from None


def import_service(module: str) -> Any:
    """A module of the services, which the bare client can do without. Raises LaunchError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LaunchError(needs(error.name)) from None


def check_installed(*services: str) -> None:
    """Raises LaunchError if libraries of "engine" or "tokenizer" are missing, which their process
    would tell with a traceback."""
    for name in itertools.chain.from_iterable(_LIBRARIES[service] for service in services):
        if importlib.util.find_spec(name) is None:
            raise LaunchError(needs(name))


def engine_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Keywords as flags of millstream-engine; None is left out. Raises TypeError."""
    fields = dataclasses.fields(import_service("millstream.engine.config").EngineConfig)
    defaults = {**{field.name: field.default for field in fields}, **_SERVER_FLAGS}
    arguments: list[str] = []
    for name, value in flags.items():
        if name not in defaults:
            raise TypeError(
                f"unexpected keyword {name!r}: the keywords are the flags of millstream-engine "
                f"with underscores: {', '.join(sorted(defaults))}"
            )
        flag = "--" + name.replace("_", "-")
        if isinstance(defaults[name], bool):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: True or False, not {value!r}")
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            arguments.append(f"{flag}={value}")
    return arguments


def tokenizer_arguments(model: str | None, flags: Mapping[str, Any]) -> list[str]:
    """What the tokenizer service takes of it."""
    shared = {name: flags[name] for name in _TOKENIZER_FLAGS if name in flags}
    return engine_arguments({"model": model, **shared})


def _start(
    processes: ServiceProcesses,
    model: str | None,
    tokenizer: bool,
    log_level: str | None,
    timeout_s: float | None,
    engine_flags: Mapping[str, Any],
) -> tuple[str, str | None]:
    """Returns the targets of the engine and the tokenizer."""
    check_bool("tokenizer", tokenizer)
    if log_level not in (None, *LEVELS):
        raise refusal("log_level", f"one of {', '.join(LEVELS)}, or None", log_level)
    if timeout_s is not None and not check_float("timeout_s", timeout_s) > 0:
        raise refusal("timeout_s", "seconds above 0", timeout_s)
    check_installed("engine", *(["tokenizer"] if tokenizer else []))
    arguments = engine_arguments({"model": model, **engine_flags})
    prefetch(model, engine_flags)
    common = ["--host", "127.0.0.1", "--port", "0", "--log-level", log_level or "warning"]
    quiet = log_level is None
    engine = processes.start("engine", [*arguments, *common], quiet=quiet)
    if tokenizer:
        arguments = tokenizer_arguments(model, engine_flags)
        text = processes.start("tokenizer", [*arguments, *common], quiet=quiet)
    processes.wait_serving(timeout_s)
    return f"127.0.0.1:{engine.port}", f"127.0.0.1:{text.port}" if tokenizer else None
