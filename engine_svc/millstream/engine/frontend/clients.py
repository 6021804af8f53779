"""Whose a stream is: what the scheduler shares the engine fairly among.

A stream is its own client, unless its RPC's metadata has an API key: then all streams with that key
are one client. A key names, it allows nothing: the engine authenticates nobody. Of a key only its
digest is kept, while a stream with it is open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

# Metadata that may hold a key; the first one found counts.
_KEY_NAMES = ("x-api-key", "authorization")


@dataclass(slots=True, eq=False)
class Client:
    """One who shares the engine with others."""

    number: int
    num_streams: int = 0
    num_live: int = 0  # requests that the core has


def api_key(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The API key in an RPC's metadata; "" if there is none."""
    found = {name: value for name, value in metadata or () if name in _KEY_NAMES}
    for name in _KEY_NAMES:
        value = found.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


class Clients:
    """The clients of the open streams."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Client] = {}

    def enter(self, key: str, stream_number: int) -> Client:
        """The client of a stream that opens; a new client has the number of its first stream."""
        if not key:
            return Client(stream_number, num_streams=1)
        client = self._by_key.setdefault(_digest(key), Client(stream_number))
        client.num_streams += 1
        return client

    def leave(self, key: str, client: Client) -> None:
        """A stream of the client has ended."""
        client.num_streams -= 1
        if key and not client.num_streams:
            del self._by_key[_digest(key)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
