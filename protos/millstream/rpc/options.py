"""gRPC channel and server options, set as a pair, and the message limit that both sides share."""

from __future__ import annotations

# A prompt of a million ids is about 3 MB, a megabyte of text encodes in less: 64 MiB is far beyond
# any context there is, and still a bound. Both services and the client default to it.
DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# gRPC's own default: what the engine sends is below it, whatever it merges for a reader that lags.
LEAST_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024
MAX_PENDING_CALLS = 16384  # that have come and no method has begun to answer
LOOKAHEAD_BYTES = 256 * 1024
# A client pings a service that was silent for so long, and takes the connection for lost when no
# answer comes within the timeout.
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000

Options = list[tuple[str, int | str]]


def server_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    return [
        # Off, or a second server binds the same port and the two share its calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # gRPC's own is 1000, beyond which it resets calls at random.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # Clients may ping each 10 s, also without calls, and are never sent away for it.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def channel_options(target: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    options: Options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # or it takes a minute
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        # HTTP/2 windows are the receiver's: a client that stops reading holds the server back after
        # about so many bytes; with gRPC's defaults after megabytes, thousands of steps stale.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ]
    if is_local(target):
        options.append(("grpc.enable_http_proxy", 0))  # http_proxy would capture localhost
    return options


def address(host: str, port: int) -> str:
    """`host:port`, as gRPC takes it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(target: str) -> bool:
    """Whether a gRPC target is this machine's own: unix sockets and loopback addresses."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = target.rsplit("/", 1)[-1]
    for scheme in ("ipv4:", "ipv6:", "dns:"):
        address = address.removeprefix(scheme)
    host = address.rsplit(":", 1)[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
