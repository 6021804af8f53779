"""The codec against the libraries it stands on."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.tiny_tokenizers import (
    ADDED_ID,
    IM_END_ID,
    byte_ids,
    byte_tokenizer,
    make_bos_tokenizer,
    make_byte_tokenizer,
    make_spm_tokenizer,
    save,
    spm_ids,
    spm_tokenizer,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from millstream.tokenizer.chat import Segment
from millstream.tokenizer.codec import Codec, TokenizerLoadError
from millstream.tokenizer.detokenizer import Detokenizer, UnknownTokenId
from millstream.tokenizer.pieces import build_pieces
from millstream.v1.tokenizer_pb2 import Chat, ChatMessage

Make = Callable[[Path], Path]


@pytest.fixture(scope="module")
def byte_codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.load(make_byte_tokenizer(tmp_path_factory.mktemp("byte")))


@pytest.fixture(scope="module")
def spm_codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.load(make_spm_tokenizer(tmp_path_factory.mktemp("spm")))


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "un", "##want", "##ed", "run", "##ning", ",", "'", "don", "t"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "▁": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


# ---- loading


def test_what_is_known_of_a_tokenizer(byte_codec: Codec, spm_codec: Codec) -> None:
    assert (byte_codec.vocab_size, byte_codec.bos_token_id, byte_codec.eos_token_id) == (
        260,
        None,
        258,
    )
    assert byte_codec.chat.has_template
    assert (spm_codec.bos_token_id, spm_codec.eos_token_id) == (1, 2)
    assert not spm_codec.chat.has_template


def test_every_id_is_below_the_vocab_size_of_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    """Clients ask for the texts of log probabilities below it, and of no others."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "far": 40}, unk_token="<unk>"))
    codec = Codec.load(save(tokenizer, tmp_path, {}))
    assert codec.vocab_size == 41
    assert codec.decode([40], skip_special_tokens=False) == "far"
    assert codec.decode([7], skip_special_tokens=False) == ""


def test_a_folder_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="has no tokenizer files"):
        Codec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match="cannot load") as caught:
        Codec.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_be_used_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = save(Tokenizer(models.BPE()), tmp_path / "empty", {})
    with pytest.raises(TokenizerLoadError, match="the vocabulary is empty"):
        Codec.load(empty)

    def denied(self: Path) -> bool:  # tests may run as root, who has every permission
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(TokenizerLoadError, match="Permission denied"):
        Codec.load(tmp_path)


def test_code_in_a_models_folder_is_never_run(tmp_path: Path) -> None:
    """Nor is the user asked about it, whatever is on stdin."""
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.A", "own.A"]}}
    folder = save(byte_tokenizer(), tmp_path, config)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = (
        "import sys, pathlib\n"
        "from millstream.tokenizer.codec import Codec\n"
        "Codec.load(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, timeout=60)
    assert "TokenizerLoadError: cannot load" in done.stderr and "custom code" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "ran").exists()


def test_row_34_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    codec = Codec.load(save(tokenizer, tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert codec.encode_batch(["ab", "abcdef"], add_special_tokens=True) == [
        byte_ids("ab"),
        byte_ids("abcdef"),
    ]


# ---- encoding


def test_row_34_many_threads_answer_as_one(byte_codec: Codec) -> None:
    texts = [f"text {i} é🙂 <|im_end|>" for i in range(50)]
    expected = [byte_codec.encode_batch([t], add_special_tokens=True)[0] for t in texts]

    chats = [Chat(messages=[ChatMessage(role="user", content=text)]) for text in texts]
    rendered = [byte_codec.chat.render(chat, field="chat") for chat in chats]

    def work(i: int) -> bool:
        if i % 4 == 0:  # transformers' own object
            return byte_codec.chat.render(chats[i % 50], field="chat") == rendered[i % 50]
        ids = byte_codec.encode_batch([texts[i % 50]], add_special_tokens=bool(i % 2))[0]
        segments = [Segment(text=texts[i % 50], is_content=False)]
        return (
            ids == expected[i % 50] == byte_codec.encode_segments(segments)
            and byte_codec.decode(ids, skip_special_tokens=False) == texts[i % 50]
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(4000)))


def test_row_19_empty_text(tmp_path: Path, byte_codec: Codec) -> None:
    assert byte_codec.encode_batch(["", "a"], add_special_tokens=True) == [[], byte_ids("a")]
    assert byte_codec.encode_batch([], add_special_tokens=True) == []
    codec = Codec.load(make_bos_tokenizer(tmp_path))
    assert codec.encode_batch([""], add_special_tokens=True) == [[1]]
    assert codec.encode_batch([""], add_special_tokens=False) == [[]]


def test_row_36_the_caller_decides_on_special_tokens(tmp_path: Path) -> None:
    folder = make_bos_tokenizer(tmp_path)
    codec, reference = Codec.load(folder), AutoTokenizer.from_pretrained(folder)
    for add in (True, False):
        expected = reference("Hello world", add_special_tokens=add)["input_ids"]
        assert codec.encode_batch(["Hello world"], add_special_tokens=add) == [expected]


@pytest.mark.parametrize("text", ["a" * 80_000, "a" * 1_000_000, " " * 1_000_000])
def test_row_77_long_runs_take_no_time(byte_codec: Codec, text: str) -> None:
    started = time.perf_counter()
    [ids] = byte_codec.encode_batch([text], add_special_tokens=True)
    assert len(ids) == len(text)
    assert time.perf_counter() - started < 10


# ---- decoding


@pytest.mark.parametrize("text", ["x != y", "hello !", "for 'manual'", " a  b ", "\n\n"])
def test_row_73_spaces_survive_both_paths(tmp_path: Path, text: str) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
    codec = Codec.load(save(byte_tokenizer(), tmp_path, config))
    [ids] = codec.encode_batch([text], add_special_tokens=False)
    assert codec.decode(ids, skip_special_tokens=True) == text
    assert streamed(codec, ids, skip=True) == text


def streamed(codec: Codec, ids: list[int], *, skip: bool) -> str:
    detokenizer = Detokenizer(codec.text_decoder(skip_special_tokens=skip))
    return detokenizer.extend(ids) + detokenizer.flush()


@pytest.mark.parametrize("make", [byte_tokenizer, spm_tokenizer, wordpiece, metaspace])
@pytest.mark.parametrize("skip", [True, False])
def test_row_28_streams_join_to_decode_for_every_kind(
    tmp_path: Path, make: Callable[[], Tokenizer], skip: bool
) -> None:
    tokenizer = make()
    codec = Codec.load(save(tokenizer, tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    rng = random.Random(4)
    for _ in range(300):
        # Byte fallback has rules of its own for broken text (test_detokenizer.py).
        ids = rng.choices(range(codec.vocab_size), k=rng.randrange(9))
        if make is not spm_tokenizer:
            assert codec.decode(ids, skip_special_tokens=skip) == tokenizer.decode(
                ids, skip_special_tokens=skip
            )
        assert streamed(codec, ids, skip=skip) == codec.decode(ids, skip_special_tokens=skip)


def test_row_74_added_is_not_special(byte_codec: Codec) -> None:
    ids = [*byte_ids("a"), ADDED_ID, IM_END_ID]
    assert byte_codec.decode(ids, skip_special_tokens=True) == "a<tool>"
    assert byte_codec.decode(ids, skip_special_tokens=False) == "a<tool><|im_end|>"


def test_row_69_ids_outside_the_vocabulary(tmp_path: Path, byte_codec: Codec) -> None:
    with pytest.raises(UnknownTokenId, match="260"):
        byte_codec.decode([1, 260], skip_special_tokens=True)
    folder = make_byte_tokenizer(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 264}))
    padded = Codec.load(folder)
    assert padded.vocab_size == 260
    assert padded.decode([*byte_ids("a"), 260, 263], skip_special_tokens=True) == "a"
    with pytest.raises(UnknownTokenId):
        padded.decode([264], skip_special_tokens=True)
    window = Codec.load(
        save(wordpiece(), tmp_path / "w", {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(UnknownTokenId):
        window.decode([99], skip_special_tokens=True)


def test_pieces_of_odd_added_tokens_equal_the_library() -> None:
    tokenizer = byte_tokenizer()
    odd = ["<tool call>", "｜begin｜", "é", "Ġ", "\n\n"]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in odd])
    pieces = build_pieces(tokenizer, id_limit=tokenizer.get_vocab_size())
    assert pieces is not None
    for token_id, piece in enumerate(pieces.by_id):
        text = piece if isinstance(piece, str) else piece.decode("utf-8", "replace")
        assert text == tokenizer.decode([token_id], skip_special_tokens=False)


def test_decoders_that_are_no_mere_join_have_no_pieces() -> None:
    for tokenizer in (wordpiece(), metaspace(), Tokenizer(models.BPE())):
        assert build_pieces(tokenizer, id_limit=9) is None


# ---- plain segments


@pytest.mark.parametrize("make", [make_byte_tokenizer, make_spm_tokenizer, make_bos_tokenizer])
def test_row_75_segments_equal_the_joined_text_without_special_tokens_in_contents(
    tmp_path: Path, make: Make
) -> None:
    codec = Codec.load(make(tmp_path))
    rng = random.Random(75)
    template_parts = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "\n", "user", " ", "Hello"]
    content_parts = ["Hello", " world", "é", "🙂", "<", "<tool>", "  ", "a\n", ""]
    for _ in range(300):
        segments = [
            Segment(
                text="".join(rng.choices(content_parts if odd else template_parts, k=3)),
                is_content=bool(odd),
            )
            for odd in (0, 1, 0, 1, 0)
        ]
        joined = "".join(segment.text for segment in segments)
        [expected] = codec.encode_batch([joined], add_special_tokens=False)
        assert codec.encode_segments(segments) == expected


def test_row_75_special_tokens_in_contents_are_plain_text(byte_codec: Codec) -> None:
    marker = "<|im_end|>"
    segments = [Segment(text=marker, is_content=odd) for odd in (False, True, False)]
    assert byte_codec.encode_segments(segments) == [IM_END_ID, *byte_ids(marker), IM_END_ID]


def test_spm_bytes_decode(spm_codec: Codec) -> None:
    assert spm_codec.decode(spm_ids("🙂"), skip_special_tokens=True) == "🙂"
