"""Reflection finds services, messages and, unlike grpcio-reflection alone, methods."""

from __future__ import annotations

import pytest

from millstream.rpc.reflection import _Pool
from millstream.v1 import engine_pb2, tokenizer_pb2


@pytest.mark.parametrize(
    "symbol",
    ["millstream.v1.Engine", "millstream.v1.Engine.Generate", "millstream.v1.StepOutput.handles"],
)
def test_symbols_are_found(symbol: str) -> None:
    assert _Pool().FindFileContainingSymbol(symbol).name == engine_pb2.DESCRIPTOR.name


def test_unknown_symbols_are_not() -> None:
    assert tokenizer_pb2.DESCRIPTOR.name.endswith("tokenizer.proto")
    for symbol in ("millstream.v1.Engine.NoSuchMethod", "millstream.v1.Nothing", "nothing"):
        with pytest.raises(KeyError):
            _Pool().FindFileContainingSymbol(symbol)
