"""`millstream-engine`: the engine service's command line; the only place that puts it together."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable

# gRPC's own lines for what we report in one of ours (a taken port). Read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from millstream import hub
from millstream.engine import config as engine_config
from millstream.engine.config import EngineConfig
from millstream.engine.service import EngineService, Model
from millstream.engine.shapes import SHAPE_NAMES
from millstream.rpc.logs import LEVELS, configure_logging
from millstream.rpc.options import DEFAULT_MAX_MESSAGE_BYTES
from millstream.rpc.server import ServerConfig, StartError, run_service

PROG = "millstream-engine"
DEFAULT_PORT = 50051


def main() -> None:
    """Serves until a signal; exits with 0, or with 1 and one line on stderr, or 2 on bad flags."""
    parser = _parser()
    arguments = parser.parse_args()
    config = engine_config.from_arguments(arguments)
    if not config.step_timeout_s > 0:
        parser.error(f"--step-timeout-s: above 0, not {config.step_timeout_s}")
    if config.max_queued_requests < 0:
        parser.error(f"--max-queued-requests: at least 0, not {config.max_queued_requests}")
    server = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        drain_timeout_s=arguments.drain_timeout_s,
        max_message_bytes=arguments.max_message_bytes,
        control_fd=arguments.control_fd,
    )
    configure_logging(arguments.log_level, process="engine")
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_serve(config, server))
    except StartError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:  # before the service took the signals over
        code = 130
    sys.exit(code)


async def _serve(config: EngineConfig, server: ServerConfig) -> int:
    service = EngineService(
        config, lambda: _find_model(config), max_message_bytes=server.max_message_bytes
    )
    return await run_service(service, server)


def _find_model(config: EngineConfig) -> Model:
    """Where the model lies, downloaded if need be. Raises StartError. Blocks, maybe for minutes."""
    dummy_shape = config.load_format == "dummy" and config.model in SHAPE_NAMES
    if dummy_shape or (config.runner != "model" and config.model is None):
        name = config.served_model_name or config.model or config.runner
        return Model(name=name, path=None, tokenizer_fingerprint="")
    try:
        path = hub.resolve(config.model)
    except hub.HubError as error:
        raise StartError(str(error)) from error
    name = config.served_model_name or config.model or path.name
    return Model(name=name, path=path, tokenizer_fingerprint=hub.fingerprint(path))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default, unless the text tells what happens without the flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or "default:" in (action.help or "")
        return action.help if unset else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Serves a model's engine over gRPC (millstream.v1.Engine): token ids in, token "
        "ids out. Stops on Ctrl-C or SIGTERM after a drain.",
        formatter_class=_HelpFormatter,
    )
    service = parser.add_argument_group("service")
    service.add_argument("--host", default="127.0.0.1", help="address to listen on")
    service.add_argument(
        "--port", type=_number(int, 0, 65535), default=DEFAULT_PORT, help="0: any free port"
    )
    service.add_argument(
        "--drain-timeout-s",
        type=_number(float, 0, 86400),
        default=5.0,
        help="how long running requests may go on after a signal to stop",
    )
    service.add_argument(
        "--max-message-bytes",
        type=_number(int, 1 << 16, 1 << 30),
        default=DEFAULT_MAX_MESSAGE_BYTES,
        help="largest gRPC message, both ways",
    )
    service.add_argument("--log-level", choices=LEVELS, default="info", help="to stderr")
    service.add_argument("--control-fd", type=int, help=argparse.SUPPRESS)
    engine_config.add_arguments(parser)
    return parser


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """A flag's type: a number from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"from {low} to {high}, not {text}")
        return value

    parse.__name__ = "number"  # argparse names it when `kind` refuses the text
    return parse


if __name__ == "__main__":
    main()
