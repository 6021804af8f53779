"""The two tiny tokenizers of the tests.

* Byte tokenizer: byte-level BPE without merges, so that every byte is one token (id = its rank in
  the byte alphabet, which `byte_ids` knows); then the special tokens and one added token that is
  not special.
* SPM tokenizer: what sentencepiece models become: "▁" for spaces, byte fallback, and a decoder that
  strips the first space.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (ENDOFTEXT, IM_START, IM_END)
ADDED_TOKEN = "<tool>"  # added, but not special: always shown
ENDOFTEXT_ID, IM_START_ID, IM_END_ID, ADDED_ID = 256, 257, 258, 259
BYTE_VOCAB_SIZE = 260

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPM_WORDS = ("▁Hello", "▁world", "▁a", "ab")
# The words' own characters and prefixes come along: BPE reaches a word by merging them in order.
SPM_PIECES = tuple(
    dict.fromkeys(
        [*_SPM_WORDS, *"▁.!abcé世", *"".join(_SPM_WORDS)]
        + [word[:end] for word in _SPM_WORDS for end in range(2, len(word))]
    )
)


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; three special tokens; one added token that is not special."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(ADDED_TOKEN, normalized=False)])
    return tokenizer


def byte_ids(data: str | bytes) -> list[int]:
    """The byte tokenizer's ids of some text or of bytes that are no text."""
    return [_ID_OF_BYTE[byte] for byte in (data.encode() if isinstance(data, str) else data)]


def _byte_to_char(byte: int) -> str:
    # GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b not in printable].index(byte))


_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_ID_OF_BYTE = [_ALPHABET.index(_byte_to_char(byte)) for byte in range(256)]


def spm_tokenizer(*, strip: bool = True) -> Tokenizer:
    """Ids: <unk> 0, <s> 1, </s> 2, the bytes 3 to 258, then SPM_PIECES from 259 on."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + rank for rank, piece in enumerate(SPM_PIECES)}
    merges = [(word[:end], word[end]) for word in _SPM_WORDS for end in range(1, len(word))]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strip else steps
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return tokenizer


def spm_ids(data: str | bytes) -> list[int]:
    """The SPM tokenizer's byte tokens for some text or for bytes that are no text."""
    return [3 + byte for byte in (data.encode() if isinstance(data, str) else data)]


def make_byte_tokenizer(directory: Path, *, chat_template: Any = CHATML_TEMPLATE) -> Path:
    """Saves the byte tokenizer so that AutoTokenizer loads it; a model may share the folder."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    return save(byte_tokenizer(), directory, config)


def make_spm_tokenizer(directory: Path, **config: Any) -> Path:
    """Saves the SPM tokenizer, which has a BOS and no chat template unless `config` brings one."""
    base = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    return save(spm_tokenizer(), directory, base | config)


def make_bos_tokenizer(directory: Path) -> Path:
    """Saves the SPM tokenizer in a form that puts a BOS before each text."""
    tokenizer = spm_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return save(tokenizer, directory, config)


def save(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> Path:
    """Writes tokenizer.json and tokenizer_config.json into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return directory
