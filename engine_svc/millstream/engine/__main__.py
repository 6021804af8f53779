"""`millstream-engine`: the engine service's command line; the only place that puts it together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

# gRPC's own lines for what we report in one of ours (a taken port). Read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Only what the core process is started with; the rest is imported while it starts.
from millstream.engine import config as engine_config
from millstream.engine.config import EngineConfig
from millstream.engine.startup.spawn import SpawnedCore, spawn_core
from millstream.rpc.flags import add_server_arguments, server_config
from millstream.rpc.logs import configure_logging
from millstream.rpc.parsing import HelpFormatter, Parser
from millstream.rpc.process import open_standard_streams, run_and_exit

if TYPE_CHECKING:
    from millstream.engine.service import Model
    from millstream.rpc.server import ServerConfig

PROG = "millstream-engine"
DEFAULT_PORT = 50051


def main() -> None:
    """Serves until a signal; exits with 0, or with 1 and one line on stderr, or 2 on bad flags."""
    open_standard_streams()
    arguments = _parser().parse_args()
    config = engine_config.from_arguments(arguments)
    configure_logging(arguments.log_level, process="engine")
    core = spawn_core(config)
    run_and_exit(PROG, _serving(config, core, server_config(arguments)))


def _serving(
    config: EngineConfig, core: SpawnedCore, server: ServerConfig
) -> Callable[[], Coroutine[Any, Any, int]]:
    """What the event loop is to run. Imports it first: a loop would not heed a Ctrl-C meanwhile."""
    from millstream.engine.frontend.servicer import DIALECT
    from millstream.engine.service import EngineService
    from millstream.engine.vllm_dialect import find_dialect
    from millstream.rpc.server import run_service

    vllm_dialect = find_dialect()

    async def serve() -> int:
        service = EngineService(
            config,
            core,
            lambda: _find_model(config),
            dialects=(DIALECT,) if vllm_dialect is None else (DIALECT, vllm_dialect),
            max_message_bytes=server.max_message_bytes,
        )
        return await run_service(service, server)

    return serve


def _find_model(config: EngineConfig) -> Model:
    """Where the model lies, downloaded if need be. Raises StartError. Blocks, maybe for minutes."""
    from millstream import hub
    from millstream.engine.load import find_model
    from millstream.engine.service import Model
    from millstream.rpc.server import StartError

    try:
        path = find_model(config)
    except hub.HubError as error:
        raise StartError(str(error)) from error
    if path is None:
        name = config.model or config.runner
        fingerprint = ""
    else:
        name = hub.display_name(config.model, path)
        fingerprint = hub.fingerprint(path)
    name = config.served_model_name or name
    return Model(name=name, path=path, tokenizer_fingerprint=fingerprint)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        description="Serves a model's engine over gRPC (millstream.v1.Engine): token ids in, token "
        "ids out. Stops on Ctrl-C or SIGTERM after a drain.",
        formatter_class=HelpFormatter,
    )
    add_server_arguments(parser, default_port=DEFAULT_PORT)
    engine_config.add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
