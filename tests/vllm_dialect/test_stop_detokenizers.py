"""The detokenizers of stop strings: from tokenizer.json, with the prompt as context."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_tokenizers import spm_tokenizer

from millstream.engine.vllm_dialect.stop_detokenizers import StopDetokenizers
from millstream.engine.vllm_dialect.submission import StopStrings
from millstream.rpc.errors import NoTokenizer


def stops(*strings: str) -> StopStrings:
    return StopStrings(strings=strings, min_tokens=0, skip_special_tokens=True)


async def test_row_29_the_text_goes_on_where_the_prompt_ends(tmp_path: Path) -> None:
    """A sentencepiece text begins without its first space, but the output is no beginning."""
    spm_tokenizer().save(str(tmp_path / "tokenizer.json"))
    detokenizers = StopDetokenizers()
    await detokenizers.load(tmp_path)
    await detokenizers.load(tmp_path)
    hello, world = (spm_tokenizer().token_to_id(piece) for piece in ("▁Hello", "▁world"))
    detokenizer = detokenizers.new(stops(" w"), context=[hello])
    detokenizer.append(world)
    assert detokenizer.stopped is not None


async def test_no_tokenizer(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(NoTokenizer, match=r"sampling_params\.stop"):
            await StopDetokenizers().load(folder)
    (tmp_path / "tokenizer.json").write_text("nonsense")
    broken = StopDetokenizers()
    for _ in range(2):
        with pytest.raises(NoTokenizer):
            await broken.load(tmp_path)
