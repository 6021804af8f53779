"""How records travel between the front end and the core process: msgpack frames on a socket pair.

    | length, 4 bytes, little endian | msgpack of one record |

The end of file means that the other process is gone. The front end's side lives on the event loop
and never blocks; the core's side blocks, and its reads belong to one thread, its writes to another.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import cast

import msgspec

from millstream.engine.records import FromCore, ToCore

_LENGTH = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size
# Wide enough that a core with a busy front end blocks only after tens of steps; it is asked for,
# and the kernel may give less.
_SOCKET_BUFFER_BYTES = 1 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair: (the front end's end, the core's end). Both are closed on exec."""
    front, core = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (front, core):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return front, core


def framed(record: ToCore) -> bytes:
    body = msgspec.msgpack.encode(record)
    return _LENGTH.pack(len(body)) + body


class CoreChannel:
    """The core's side. One thread calls `receive`, any may call `send`; both block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb", buffering=_SOCKET_BUFFER_BYTES)
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()
        self._frame = bytearray()
        self._sending = threading.Lock()

    def receive(self) -> ToCore | None:
        """The next record; None when the front end is gone. Raises msgspec.ValidationError."""
        try:
            header = self._reader.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES:
                return None
            (length,) = _LENGTH.unpack(header)
            body = self._reader.read(length)
        except ConnectionError:
            return None
        return self._decoder.decode(body) if len(body) == length else None

    def send(self, record: FromCore, *, patience_s: float = -1) -> None:
        """Sends a record; blocks while the front end lags. Raises OSError when it is gone, or when
        another thread's record has kept this one waiting for patience_s."""
        if not self._sending.acquire(timeout=patience_s):
            raise TimeoutError("the front end takes no records")
        try:
            self._encoder.encode_into(record, self._frame, _HEADER_BYTES)
            _LENGTH.pack_into(self._frame, 0, len(self._frame) - _HEADER_BYTES)
            self._connection.sendall(self._frame)
        finally:
            self._sending.release()


class FrontChannel(asyncio.Protocol):
    """The front end's side: calls `on_record` for each record and `on_closed` once at the end,
    with what broke the channel, if it was not the core's end.

    Writes are buffered without a bound of their own: what is sent is bounded by the number of live
    requests, and the core's reader thread always reads.
    """

    def __init__(
        self,
        on_record: Callable[[FromCore], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        self._on_record = on_record
        self._on_closed = on_closed
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(
        cls,
        connection: socket.socket,
        *,
        on_record: Callable[[FromCore], None],
        on_closed: Callable[[Exception | None], None],
    ) -> FrontChannel:
        """Takes the socket over. An exception out of a callback closes the channel."""
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(
            lambda: cls(on_record, on_closed), sock=connection
        )
        return channel

    def send(self, record: ToCore) -> None:
        """Never blocks; a record for a core that is gone is dropped, `on_closed` tells."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(record))

    def close(self) -> None:
        """The core sees the end of file and exits."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        start, end = 0, len(self._received)
        with memoryview(self._received) as view:
            while end - start >= _HEADER_BYTES:
                (length,) = _LENGTH.unpack_from(view, start)
                stop = start + _HEADER_BYTES + length
                if stop > end:
                    break
                record = self._decoder.decode(view[start + _HEADER_BYTES : stop])
                start = stop
                self._on_record(record)
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed(exc)
