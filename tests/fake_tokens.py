"""The vocabulary of the fake services, and texts of it.

Every byte is a token (id = its value); EOS is a special token, ADDED one that is not special.
"""

from __future__ import annotations

import random

from millstream.tokenizer.detokenizer import PieceDecoder, Pieces

EOS, ADDED = 256, 257
EOS_TEXT, ADDED_TEXT = "<eos>", "<tool>"
VOCAB_SIZE = 258
FINGERPRINT = "f" * 64


def decoder(skip_special_tokens: bool) -> PieceDecoder:
    pieces = [chr(i) if i < 128 else bytes([i]) for i in range(256)]
    return PieceDecoder(
        Pieces(by_id=[*pieces, "" if skip_special_tokens else EOS_TEXT, ADDED_TEXT])
    )


def text_of(token_ids: list[int], skip_special_tokens: bool = True) -> str:
    one = decoder(skip_special_tokens)
    return "".join(map(one.decode, token_ids)) + one.flush()


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("abc é🙂世") for _ in range(length))
