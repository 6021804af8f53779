"""Engines that speak the vLLM protocol, with fake runners and the tiny byte tokenizer.

The runner's token after t is t + 1, and the byte tokenizer's ids of letters are in their order:
after a prompt that ends with "A" comes "BCDEFG...".
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.engine_processes import EngineProcess, engine
from tests.fake_runners import EOS_TOKEN_ID, VOCAB_SIZE
from tests.tiny_tokenizers import byte_tokenizer

from millstream.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, channel_options

if TYPE_CHECKING:
    from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

# Where the stubs are not installed (a GPU machine has what it came with) there is no service.
if find_spec("smg_grpc_proto") is None:
    collect_ignore_glob = ["test_*.py"]

MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def byte_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 256,
        "pad_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 20, "temperature": 0.5}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for other in ("model.safetensors.index.json", "notes.txt", "secrets.json"):
        (folder / other).write_text("no part of a tokenizer")
    return folder


@pytest.fixture(scope="module")
def server(byte_model_dir: Path) -> Iterator[EngineProcess]:
    flags = f"--max-num-seqs {MAX_NUM_SEQS} --max-model-len {MAX_MODEL_LEN}".split()
    flags += ["--model", str(byte_model_dir), "--served-model-name", "bytes"]
    with engine(*flags, runner="tests.fake_runners:scripted") as started:
        yield started


@pytest.fixture
async def channel(server: EngineProcess) -> AsyncIterator[grpc.aio.Channel]:
    options = channel_options(server.target, DEFAULT_MAX_MESSAGE_BYTES)
    async with grpc.aio.insecure_channel(server.target, options=options) as connected:
        yield connected


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> vllm_grpc.VllmEngineStub:
    from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

    return vllm_grpc.VllmEngineStub(channel)
