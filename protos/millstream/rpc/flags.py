"""The flags that every service has."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millstream.rpc.logs import LEVELS
from millstream.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, LEAST_MAX_MESSAGE_BYTES
from millstream.rpc.parsing import number

if TYPE_CHECKING:
    from millstream.rpc.server import ServerConfig


def add_server_arguments(parser: argparse.ArgumentParser, *, default_port: int) -> None:
    """Adds the flags of ServerConfig, and --log-level."""
    service = parser.add_argument_group("service")
    service.add_argument("--host", default="127.0.0.1", help="address to listen on")
    service.add_argument(
        "--port", type=number(int, 0, 65535), default=default_port, help="0: any free port"
    )
    service.add_argument(
        "--drain-timeout-s",
        type=number(float, 0, 86400),
        default=5.0,
        help="how long running requests may go on after a signal to stop",
    )
    service.add_argument(
        "--max-message-bytes",
        type=number(int, LEAST_MAX_MESSAGE_BYTES, 1 << 30),
        default=DEFAULT_MAX_MESSAGE_BYTES,
        help="largest gRPC message, both ways",
    )
    service.add_argument("--log-level", choices=LEVELS, default="info", help="to stderr")
    service.add_argument("--control-fd", type=int, help=argparse.SUPPRESS)


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """What the flags of add_server_arguments say."""
    from millstream.rpc.server import ServerConfig  # brings grpc, which parsing need not wait for

    return ServerConfig(
        host=arguments.host,
        port=arguments.port,
        drain_timeout_s=arguments.drain_timeout_s,
        max_message_bytes=arguments.max_message_bytes,
        control_fd=arguments.control_fd,
    )
