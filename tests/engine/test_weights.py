"""The loader takes every tensor of a checkpoint to its place, or says which one has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.paged import CPU, load_model, paged_logits
from tests.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from millstream.engine.backends.torch_ops import TorchOps
from millstream.engine.model_files.model_config import load_model_config
from millstream.engine.model_files.shapes import named_shape
from millstream.engine.models import DecoderModel, build_model
from millstream.engine.weights import WeightError, init_dummy_weights, load_weights

PROMPT = [3, 141, 59, 26, 53]


def logits(model: DecoderModel) -> torch.Tensor:
    return paged_logits(model, [(PROMPT, [])], chunk_tokens=8)[0]


def edit(model_dir: Path, **changes: torch.Tensor | None) -> Path:
    """Sets or (None) removes tensors; "__" in a name stands for a dot."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)
    return model_dir


def test_sharded_and_single_files_are_the_same_model(tmp_path: Path) -> None:
    single = make_tiny_model(tmp_path / "single")
    sharded = make_tiny_model(tmp_path / "sharded", max_shard_size=20_000)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load_model(single)), logits(load_model(sharded)))
    (sharded / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(load_model(single)), logits(load_model(sharded)))


def test_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype=torch.bfloat16)
    assert load_model_config(model_dir).dtype == "bfloat16"
    wide = edit(make_tiny_model(tmp_path / "wide"))
    tensors = load_file(model_dir / "model.safetensors")
    save_file({k: v.float() for k, v in tensors.items()}, wide / "model.safetensors")
    assert torch.equal(logits(load_model(model_dir)), logits(load_model(wide)))


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, max_shard_size=20_000)
    config = load_model_config(model_dir)
    model = build_model(
        config,
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        ops=TorchOps(config),
    )
    seen: list[tuple[int, int]] = []
    load_weights(model, model_dir, on_progress=lambda done, total: seen.append((done, total)))
    done = [item[0] for item in seen]
    total = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    assert done == sorted(done)
    assert len(seen) > 20
    assert {item[1] for item in seen} == {total}
    assert done[-1] == total


@pytest.mark.parametrize("with_head", [True, False])
def test_row_55_tied_with_and_without_a_head_in_the_file(with_head: bool, tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    expected = logits(load_model(model_dir))
    if with_head:
        embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
        edit(model_dir, lm_head__weight=embedding.clone())
    assert torch.equal(logits(load_model(model_dir)), expected)


def test_row_55_tied_with_the_head_in_place_of_the_embedding(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    expected = logits(load_model(model_dir))
    embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    edit(model_dir, model__embed_tokens__weight=None, lm_head__weight=embedding)
    assert torch.equal(logits(load_model(model_dir)), expected)


def test_row_55_a_head_that_differs_is_not_tied_as_in_transformers(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    edit(model_dir, lm_head__weight=torch.randn(256, 64))
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(load_model(model_dir)), expected, atol=1e-4, rtol=1e-4)


def test_row_55_untied_without_a_head_is_an_error(tmp_path: Path) -> None:
    model_dir = edit(make_tiny_model(tmp_path), lm_head__weight=None)
    with pytest.raises(WeightError, match=r"lacks lm_head\.weight \(tie_word_embeddings is false"):
        load_model(model_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__norm__weight": None}, r"lacks model\.norm\.weight"),
        ({"model__layers__1__self_attn__k_proj__weight": None}, r"layers\.1\.self_attn\.k_proj"),
        ({"model__norm__weight": torch.ones(63)}, r"norm\.weight has shape \[63\].*\[64\]"),
        (
            {"model__layers__0__mlp__up_proj__weight": torch.ones(64, 96)},
            r"up_proj\.weight has shape \[64, 96\].*\[96, 64\]",
        ),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int8)}, r"norm\.weight is torch\.int8"),
    ],
)
def test_row_60_misfits_name_the_tensor(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightError, match=message):
        load_model(edit(make_tiny_model(tmp_path), **change))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.extra"])
def test_row_60_left_over_tensors_are_an_error(name: str, tmp_path: Path) -> None:
    model_dir = edit(make_tiny_model(tmp_path), **{name: torch.ones(64)})
    with pytest.raises(WeightError, match="no place for " + name.replace(".", r"\.")):
        load_model(model_dir)


def test_row_60_config_without_the_bias_that_the_file_has(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, "llama", attention_bias=True)
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**raw, "attention_bias": False}))
    with pytest.raises(WeightError, match=r"no place for .*bias.* and 5 more"):
        load_model(model_dir)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    expected = logits(load_model(model_dir))
    edit(model_dir, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert torch.equal(logits(load_model(model_dir)), expected)


def test_broken_files_are_one_clear_line(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    path = model_dir / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightError, match=r"cannot read .*model\.safetensors"):
        load_model(model_dir)
    path.unlink()
    with pytest.raises(WeightError, match=r"holds no \*\.safetensors"):
        load_model(model_dir)


@pytest.mark.parametrize(
    ("file_name", "message"),
    [("../model.safetensors", "outside its folder"), ("absent.safetensors", "cannot read")],
)
def test_index_that_points_elsewhere(file_name: str, message: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, max_shard_size=20_000)
    path = model_dir / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file_name
    path.write_text(json.dumps(index))
    with pytest.raises(WeightError, match=message):
        load_model(model_dir)


def test_index_without_a_weight_map(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    (model_dir / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightError, match="weight_map"):
        load_model(model_dir)


def test_index_that_names_a_tensor_which_its_file_lacks(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, max_shard_size=20_000)
    path = model_dir / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    wrong = next(file for file in files if file != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong
    path.write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"model\.norm\.weight is not in"):
        load_model(model_dir)


def test_dummy_weights_are_seeded_and_finite() -> None:
    config = named_shape("smollm2-135m")
    assert config is not None

    def dummy(seed: int) -> DecoderModel:
        model = build_model(
            config,
            dtype=torch.bfloat16,
            device=CPU,
            max_model_len=64,
            ops=TorchOps(config),
        )
        init_dummy_weights(model, seed)
        return model

    first, again, other = dummy(1), dummy(1), dummy(2)
    for ours, same, differs in zip(
        first.parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(ours, same)
        assert ours.dim() == 1 or not torch.equal(ours, differs)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    result = paged_logits(first, [(PROMPT, [])], chunk_tokens=8, block_size=16)[0]
    assert result.isfinite().all()
    assert result.dtype == torch.bfloat16
    assert 0.1 < result.std() < 10


def test_packed_weights_give_the_same_products(tmp_path: Path) -> None:
    """float32 on a CPU is packed by the loader; a model in float64 never is."""
    model_dir = make_tiny_model(tmp_path, "llama", attention_bias=True)
    packed = load_model(model_dir)
    assert not hasattr(packed.model.layers[0].self_attn.o_proj, "weight")
    plain = load_model(model_dir, dtype=torch.float64)
    torch.testing.assert_close(logits(packed), logits(plain).float(), atol=1e-4, rtol=1e-4)
