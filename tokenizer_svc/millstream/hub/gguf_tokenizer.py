"""A GGUF file's tokenizer as tokenizer.json, tokenizer_config.json and chat templates.

Built with the `tokenizers` library alone: transformers' own GGUF reader needs torch, which the
tokenizer service does without. Two kinds are known: "gpt2" (byte-level BPE with its merges) and
"llama" (SentencePiece BPE, whose merges follow from the scores).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from millstream.hub.errors import GgufError
from millstream.hub.gguf_file import TEMPLATE_KEY

Metadata = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How text is cut before the merges apply, by tokenizer.ggml.pre. These are the patterns that the
# models' own tokenizer.json files publish. None: GPT-2's pattern; digits: each digit on its own.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_NAMES = ("default", "gpt-2")
_DIGITS_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "pixtral")
_SPLITS = {
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_SPLIT),
    "tekken": _TEKKEN_SPLIT,
}
# Whole words of the vocabulary are taken as they are, whatever the merges say.
_IGNORE_MERGES = (*_LLAMA3_NAMES, "tekken")


def write_tokenizer(metadata: Metadata, folder: Path, vocab_size: int) -> None:
    """Writes the tokenizer's files into `folder`. Raises GgufError for a kind that isn't known, or
    a vocabulary that does not fit the model's vocab_size."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise GgufError("the file has no vocabulary (tokenizer.ggml.tokens)")
    distinct = len(set(tokens))
    if len(tokens) > vocab_size or distinct != len(tokens):
        raise GgufError(
            f"{len(tokens)} tokens, {distinct} of them different, for a model of {vocab_size}"
        )
    special = {
        f"{name}_token": tokens[metadata[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if metadata.get(key, len(tokens)) < len(tokens)
    }
    match kind := metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(metadata, tokens)
        case "llama":
            tokenizer = _sentencepiece(metadata, tokens, special.get("unk_token"))
        case _:
            raise GgufError(f"tokenizer {kind!r} is not supported, only 'gpt2' and 'llama' are")
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    edges = _add_edges(tokenizer, metadata, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **edges,
        **special,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_templates(metadata, folder)


def _byte_level(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=name not in _SPLITS)
    steps: list[Any]
    if name in _SPLITS:
        steps = [pre.Split(Regex(_SPLITS[name]), behavior="isolated"), byte_level]
    elif name in _DIGITS_NAMES:
        steps = [pre.Digits(individual_digits=True), byte_level]
    elif name in _GPT2_NAMES:
        steps = [byte_level]
    else:
        raise GgufError(f"pre-tokenizer {name!r} is not known; guessing would change the tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    if odd := [merge[0] for merge in merges if len(merge) != 2]:
        raise GgufError(f"the file's merge {odd[0]!r} is not two tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(ids, merges, ignore_merges=name in _IGNORE_MERGES))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str], unk_token: str | None) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise GgufError("a SentencePiece vocabulary needs a score for each token")
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    merges.sort(key=lambda merge: (-merge[0], ids[merge[1]], ids[merge[2]]))
    pairs = [(left, right) for _, left, right in merges]
    bpe = _bpe(ids, pairs, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps
    )
    return tokenizer


def _bpe(ids: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception, e.g. for a merge not in ids
        raise GgufError(f"the file's vocabulary and merges do not fit together: {error}") from error


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are matched whole in the text; control tokens are left out of decoded text."""
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    user = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user])


def _add_edges(
    tokenizer: Tokenizer, metadata: Metadata, special: Mapping[str, str]
) -> dict[str, bool]:
    """Makes encoding add BOS and EOS where the file says so, or where its kind always does."""
    default_bos = (
        metadata["tokenizer.ggml.model"] == "llama"
        or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    )
    bos, eos = special.get("bos_token"), special.get("eos_token")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)) and bos is not None
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and eos is not None
    if add_bos or add_eos:
        first = [str(bos)] if add_bos else []
        last = [str(eos)] if add_eos else []
        second = [f"{token}:1" for token in (*first, "$B", *last)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *second],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*first, *last}],
        )
    return {"add_bos_token": add_bos, "add_eos_token": add_eos}


def _write_templates(metadata: Metadata, folder: Path) -> None:
    """chat_template.jinja, and the named ones in the folder where transformers looks for them."""
    if template := metadata.get(TEMPLATE_KEY):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for key, template in metadata.items():
        name = key.removeprefix(f"{TEMPLATE_KEY}.")
        if name != key and name.replace("_", "").replace("-", "").isalnum():
            named = folder / "additional_chat_templates"
            named.mkdir(exist_ok=True)
            (named / f"{name}.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
