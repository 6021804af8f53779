"""How an Encode request is cut for the threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from millstream.rpc.errors import InvalidArgument
from millstream.tokenizer.encoder import EncodeLimits, Encoder
from millstream.v1.tokenizer_pb2 import EncodeInput, EncodeRequest

COUNT = 100_000


class NotingPool(ThreadPoolExecutor):
    """Notes how many inputs each job has."""

    def __init__(self) -> None:
        super().__init__(1)
        self.sizes: list[int] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sizes.append(len(args[0]))
        return super().submit(fn, *args, **kwargs)


class NoCodec:
    """Nothing comes of anything."""

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [[] for _ in texts]


@pytest.mark.parametrize("item", [EncodeInput(text=""), EncodeInput()], ids=["empty", "unset"])
async def test_row_88_inputs_without_bytes_come_in_many_jobs_too(item: EncodeInput) -> None:
    """20 MB of inputs that are not set were one job, which held the event loop up for 50 s."""
    codec: Any = NoCodec()
    limits = EncodeLimits(max_text_bytes=1000, timeout_s=60)
    request = EncodeRequest(inputs=[item] * COUNT)
    with NotingPool() as pool:
        encoder = Encoder(codec, pool, threads=1, limits=limits)
        if item.WhichOneof("input"):
            assert len((await encoder.encode(request)).sequences) == COUNT
            assert sum(pool.sizes) == COUNT
        else:
            with pytest.raises(InvalidArgument, match=r"inputs\[0\]"):
                await encoder.encode(request)
        assert max(pool.sizes) <= 2048
