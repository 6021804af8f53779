"""Server reflection (grpc.reflection.v1alpha) that also finds methods.

Python's descriptor pool knows no symbol "package.Service.Method", so grpcio-reflection alone cannot
answer `grpcurl describe package.Service.Method`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection


class _Pool:
    """The default descriptor pool; a symbol that it does not know is looked up by its parent's."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            parent, _, method = symbol.rpartition(".")
            service = self._pool.FindServiceByName(parent)
            if method not in service.methods_by_name:
                raise
            return service.file


def enable_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Adds the reflection service for these services and itself."""
    names = (*service_names, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_Pool())
