"""GGUF files in, Hugging Face folders out: the same tensors and logits, or a clear refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from tests.hub.gguf_files import CHAT_TEMPLATE, expected_state, tiny_llama, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from millstream.hub.checkpoint import to_bf16
from millstream.hub.errors import GgufError
from millstream.hub.gguf_import import import_gguf

IDS = torch.arange(2, 40).reshape(2, 19)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def check_same_model(folder: Path, source: Any, tensor_type: Type) -> None:
    """The folder's tensors, and its logits in float32, are those of the quantised source."""
    expected = expected_state(source, tensor_type)
    written: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        written |= load_file(file)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
    source.load_state_dict({name: t.float() for name, t in expected.items()}, strict=False)
    imported, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(imported), logits(source), rtol=0, atol=0)


@pytest.mark.parametrize(
    "tensor_type", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1], ids=lambda kind: kind.name
)
def test_tensor_types_import_exactly(tmp_path: Path, tensor_type: Type) -> None:
    source = tiny_llama()
    file = write_gguf(tmp_path / "tiny.gguf", source, tensor_type)
    import_gguf(file, tmp_path / "out")
    check_same_model(tmp_path / "out", source, tensor_type)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"num_key_value_heads": 1},
    ],
    ids=["row 55: tied", "row 60: biases", "mha", "row 59: mqa, head_dim not hidden/heads"],
)
def test_architecture_details_import_exactly(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = tiny_llama(seed=1, **changes)
    file = write_gguf(tmp_path / "tiny.gguf", source)
    import_gguf(file, tmp_path / "out")
    check_same_model(tmp_path / "out", source, Type.F32)


def test_row_39_rope_scalings_are_mapped(tmp_path: Path) -> None:
    """Linear and yarn from metadata; llama3 from the frequency tensor that replaces it."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    linear = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0}
    for number, rope in enumerate((llama3, yarn, linear)):
        source = tiny_llama(rope_parameters=rope)
        metadata: dict[str, Any] = {}
        extra = {}
        if rope is llama3:
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](source.config, "cpu")
            plain = rope["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
            extra["rope_freqs.weight"] = (plain / scaled).float().numpy()
        else:
            metadata["llama.rope.scaling.type"] = rope["rope_type"]
            metadata["llama.rope.scaling.factor"] = rope["factor"]
            if rope is yarn:
                metadata["llama.rope.scaling.original_context_length"] = 32
        file = write_gguf(tmp_path / f"{number}.gguf", source, metadata=metadata, extra=extra)
        import_gguf(file, tmp_path / f"out{number}")
        assert json.loads((tmp_path / f"out{number}/config.json").read_text())[
            "rope_parameters"
        ] == pytest.approx(rope)
        check_same_model(tmp_path / f"out{number}", source, Type.F32)


def test_tokenizer_template_and_row_15_several_eos_ids(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    import_gguf(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello 12").input_ids) == [
        *("hello", "Ġ", "1", "2")
    ]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("<|im_start|>").input_ids == [0]
    text = "x != y, naïve 🙂\n<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 2]
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 1


def test_shards_have_an_index(tmp_path: Path) -> None:
    source = tiny_llama()
    file = write_gguf(tmp_path / "tiny.gguf", source)
    import_gguf(file, tmp_path / "out", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((tmp_path / "out" / name).is_file() for name in files)
    check_same_model(tmp_path / "out", source, Type.F32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "qwen2"}, "architecture is 'qwen2'"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "no blk.1.ffn_up.weight"),
        ({"drop": ("token_embd.weight",)}, "no token_embd.weight"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.ones(32, np.float32)}}, "attn_q_norm"),
        ({"extra": {"rope_freqs.weight": np.full(16, 3, np.float32)}}, "rope_freqs.weight"),
        ({"extra": {"rope_factors_long.weight": np.ones(16, np.float32)}}, "rope_factors_long"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 16}}, "rope over 16 of 32"),
        ({"metadata": {"llama.attention.value_length": 16}}, "values of 16"),
        (
            {"metadata": {"llama.attention.sliding_window": 8}},
            "sets llama.attention.sliding_window",
        ),
        ({"metadata": {"llama.expert_count": 8}}, "experts"),
        ({"metadata": {"llama.block_count": None}}, "does not set llama.block_count"),
        ({"metadata": {"llama.attention.head_count": [4, 4]}}, "layer to layer"),
        ({"metadata": {"llama.feed_forward_length": 128}}, "has shape (96, 64), not (128, 64)"),
        ({"metadata": {"tokenizer.ggml.pre": "gibberish"}}, "pre-tokenizer 'gibberish'"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer 'bert'"),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, "no vocabulary"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a", "b", "a"]}}, "3 tokens, 2 of them"),
        ({"metadata": {"tokenizer.ggml.tokens": [*"abc", *map(str, range(300))]}}, "303 tokens"),
        ({"metadata": {"tokenizer.ggml.merges": ["zz qq"]}}, "do not fit together"),
        ({"metadata": {"split.count": 2}}, "several files"),
        # Hostile: values of another type than their key's, or of no use.
        ({"metadata": {"llama.context_length": "x"}}, "context_length is 'x', not a number above"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count is 0, not a number above 0"),
        ({"metadata": {"llama.rope.freq_base": float("nan")}}, "freq_base is nan, not a number"),
        ({"metadata": {"llama.rope.scaling.type": 1}}, "scaling.type is 1, not a text"),
        (
            {"metadata": {"tokenizer.ggml.tokens": [1, 2]}},
            "tokens is [1, 2], not an array of texts",
        ),
        ({"metadata": {"tokenizer.ggml.token_type": 7}}, "not an array of whole numbers"),
        ({"metadata": {"tokenizer.ggml.scores": ["a"]}}, "not an array of numbers"),
        ({"metadata": {"tokenizer.ggml.bos_token_id": 1.5}}, "is 1.5, not a whole number"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": True}}, "is True, not a whole number"),
        ({"metadata": {"tokenizer.ggml.merges": ["a"]}}, "merge 'a' is not two tokens"),
        ({"metadata": {"tokenizer.chat_template": 7}}, "chat_template is 7, not a text"),
        ({"metadata": {"tokenizer.chat_template.rag": [1]}}, "rag is [1], not a text"),
        ({"metadata": {"llama.block_count": 2**32 - 1}}, "tensors for 4294967295 layers"),
        ({"metadata": {"llama.attention.key_length": 31}}, "even head dimension, not 31"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **changes)
    with pytest.raises(GgufError) as caught:
        import_gguf(file, tmp_path / "out")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_unsupported_tensor_types_are_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_norm.weight": np.ones(64, np.int8)}
    file = write_gguf(
        tmp_path / "tiny.gguf", tiny_llama(), drop=("blk.0.attn_norm.weight",), extra=extra
    )
    with pytest.raises(GgufError, match=r"attn_norm\.weight has tensor type I8"):
        import_gguf(file, tmp_path / "out")


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    (tmp_path / "out").mkdir()
    import_gguf(file, tmp_path / "out")  # empty: fine
    with pytest.raises(GgufError, match="not an empty folder"):
        import_gguf(file, tmp_path / "out")
    with pytest.raises(GgufError, match="not an empty folder"):
        import_gguf(file, file)


@pytest.mark.parametrize("out", [".", "link", "empty"])
def test_an_empty_folder_is_filled_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """It may be the current folder, a link or a mounted volume."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    folder = tmp_path / "empty"
    folder.mkdir()
    inode = folder.stat().st_ino
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder if out == "." else tmp_path)
    import_gguf(file, Path(out))
    assert folder.stat().st_ino == inode
    import_gguf(file, tmp_path / "new")
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == {
        path.name: path.stat().st_size for path in (tmp_path / "new").iterdir()
    }
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("existing", [True, False])
def test_an_interrupted_import_leaves_nothing(tmp_path: Path, existing: bool) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    if existing:
        (tmp_path / "out").mkdir()

    def interrupt(step: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(file, tmp_path / "out", interrupt)
    if existing:
        (tmp_path / "out").rmdir()  # raises if it is not empty
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_bf16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1]
    values = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    values = values[~np.isnan(values)]
    ours = torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).bfloat16())
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    assert torch.from_numpy(to_bf16(nans).view(np.int16)).view(torch.bfloat16).isnan().all()


def test_importing_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    code = (
        "import sys\n"
        "import millstream.hub\n"
        "heavy = {'numpy', 'tokenizers', 'huggingface_hub', 'torch', 'transformers'}\n"
        "assert not heavy & sys.modules.keys(), 'importing millstream.hub is to be cheap'\n"
        "from millstream.hub.__main__ import main\n"
        "status = main(['import-gguf', *sys.argv[1:]])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(status)\n"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "out")
    assert "converting" in done.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert again.stderr == f"error: {tmp_path / 'out'} exists and is not an empty folder\n"
