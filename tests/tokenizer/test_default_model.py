"""The codec on the real default model's tokenizer, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from millstream.tokenizer.codec import Codec
from millstream.tokenizer.decoding import Decoding
from millstream.tokenizer.detokenizer import Detokenizer
from millstream.v1.tokenizer_pb2 import Chat, ChatMessage

TEXTS = [
    "The capital of France is Paris.",
    "x != y , hello ! for 'manual'",
    "  def f(x):\n\treturn x**2  # naïve café\n\n\n",
    "世界 こんにちは 안녕하세요 👨‍👩‍👧 🙂",
    "<|im_start|>user\nhi<|im_end|> 1234567 \u0000 \ufffd",
]


@pytest.fixture(scope="module")
def codec(default_model_dir: Path) -> Codec:
    return Codec.load(default_model_dir)


@pytest.fixture(scope="module")
def reference(default_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir)


def test_ids_and_texts_equal_transformers(codec: Codec, reference: Any) -> None:
    expected = [reference(text)["input_ids"] for text in TEXTS]
    assert codec.encode_batch(TEXTS, add_special_tokens=True) == expected
    for ids, text in zip(expected, TEXTS, strict=True):
        assert codec.decode(ids, skip_special_tokens=False) == text  # row 73
        for skip in (True, False):
            whole = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert codec.decode(ids, skip_special_tokens=skip) == whole


def test_random_ids_stream_to_the_full_decode(codec: Codec, reference: Any) -> None:
    rng = random.Random(1)
    for _ in range(100):
        ids = rng.choices(range(codec.vocab_size), k=rng.randrange(60))
        cut = rng.randrange(len(ids) + 1)
        context, output = ids[:cut], ids[cut:]
        detokenizer = Detokenizer(codec.text_decoder(skip_special_tokens=True), context=context)
        streamed = "".join([detokenizer.append(i) for i in output]) + detokenizer.flush()
        before, whole = (
            reference.decode(i, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for i in (context, ids)
        )
        if whole.startswith(before):  # else the output completed the context's last character
            assert streamed == whole.removeprefix(before)


def test_chats_equal_transformers(codec: Codec, reference: Any) -> None:
    messages = [{"role": "user", "content": text} for text in TEXTS[:4]]
    chat = Chat(messages=[ChatMessage(**message) for message in messages])
    expected = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    text = codec.chat.render(chat, field="chat")
    assert codec.encode_batch([text], add_special_tokens=False) == [expected]
    # Contents without control tokens encode the same as plain text.
    assert codec.encode_segments(codec.chat.render_segments(chat, field="chat")) == expected


def test_row_77_long_runs_on_the_real_tokenizer(codec: Codec) -> None:
    for text in ("a" * 80_000, " " * 1_000_000, "a" * 1_000_000):
        [ids] = codec.encode_batch([text], add_special_tokens=True)
        assert codec.decode(ids, skip_special_tokens=True) == text


def test_decoding_needs_no_transformers(default_model_dir: Path, codec: Codec) -> None:
    """The engine's front end loads tokenizer.json alone, and gets the same text."""
    alone = Decoding.load(default_model_dir)
    assert alone.vocab_size == codec.vocab_size
    rng = random.Random(3)
    for skip in (True, False):
        for _ in range(200):
            token_ids = [*rng.choices(range(codec.vocab_size), k=20), 0, 1, 2]
            text = codec.decode(token_ids, skip_special_tokens=skip)
            assert alone.decode(token_ids, skip_special_tokens=skip) == text
