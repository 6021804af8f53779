"""The detokenizers that look for stop strings: this protocol leaves that to the engine's side.

The tokenizer is loaded when the first request needs it, on a thread; nothing else here does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.engine.vllm_dialect.submission import StopStrings
from millstream.rpc.errors import NoTokenizer
from millstream.rpc.text_context import text_context
from millstream.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    from millstream.tokenizer.decoding import Decoding

logger = logging.getLogger(__name__)


class StopDetokenizers:
    """Makes them, once the tokenizer is loaded. All of it runs on the event loop."""

    def __init__(self) -> None:
        self._loading: asyncio.Future[Decoding] | None = None

    async def load(self, model_dir: Path | None) -> None:
        """Waits for the tokenizer. Raises NoTokenizer if the model has none that can be used."""
        if model_dir is None:
            raise _no_tokenizer("the model has no tokenizer")
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_load, model_dir))
        try:
            await asyncio.shield(self._loading)
        except (OSError, ValueError) as error:
            logger.warning("no stop strings: %s", error)
            raise _no_tokenizer("the model's folder has no tokenizer.json that can be used") from (
                error
            )

    def new(self, stops: StopStrings, *, context: Sequence[int]) -> Detokenizer:
        """One for an output that follows `context`; `load` came before."""
        assert self._loading is not None
        decoder = self._loading.result().text_decoder(skip_special_tokens=stops.skip_special_tokens)
        return Detokenizer(
            decoder,
            context=text_context(context),
            stops=stops.strings,
            min_tokens=stops.min_tokens,
        )


def _load(model_dir: Path) -> Decoding:
    from millstream.tokenizer.decoding import Decoding  # and with it `tokenizers`

    return Decoding.load(model_dir)


def _no_tokenizer(why: str) -> NoTokenizer:
    return NoTokenizer(f"sampling_params.stop: {why}", field="sampling_params.stop")
