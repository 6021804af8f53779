"""What the engine tells of itself: health, model, server, loads, tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2 as common
from tests.engine_processes import EngineProcess, engine, eventually, listening_port
from tests.fake_runners import BLOCK_SIZE, EOS_TOKEN_ID, VOCAB_SIZE
from tests.toy_runner import toy_info
from tests.vllm_dialect.calls import Call, request
from tests.vllm_dialect.conftest import MAX_MODEL_LEN, MAX_NUM_SEQS

from millstream.engine.vllm_dialect.describe import LoadReports
from millstream.v1 import engine_pb2

SERVICE = "vllm.grpc.engine.VllmEngine"


async def test_health(channel: grpc.aio.Channel, stub: vllm_grpc.VllmEngineStub) -> None:
    assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_health_while_the_model_loads() -> None:
    starting = EngineProcess(runner="tests.fake_runners:slow_load")
    try:
        starting.core_pid()
        port = await asyncio.to_thread(listening_port, starting.process.pid)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = vllm_grpc.VllmEngineStub(channel)
            answer = await stub.HealthCheck(vllm.HealthCheckRequest(), wait_for_ready=True)
            assert (answer.healthy, answer.message) == (False, "the engine is starting")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetModelInfo(vllm.GetModelInfoRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Call(stub, request([1])).to_end()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        starting.stop()


async def test_the_model(stub: vllm_grpc.VllmEngineStub, byte_model_dir: Path) -> None:
    info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert json.loads(info.default_sampling_params_json) == {"top_k": 20, "temperature": 0.5}
    info.ClearField("default_sampling_params_json")
    assert info == vllm.GetModelInfoResponse(
        model_path=str(byte_model_dir),
        is_generation=True,
        max_context_length=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        served_model_name="bytes",
        tokenizer_path=str(byte_model_dir),
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[EOS_TOKEN_ID],
        bos_token_id=256,
        max_req_input_len=MAX_MODEL_LEN - 1,
    )


async def test_the_server(stub: vllm_grpc.VllmEngineStub) -> None:
    call = Call(stub, request([10], max_tokens=200))
    await call.until_token()
    info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert info.active_requests == 1
    assert info.uptime_seconds > 0
    assert info.last_receive_timestamp > 0
    assert (info.block_size, info.max_num_seqs) == (BLOCK_SIZE, MAX_NUM_SEQS)
    assert not info.is_paused
    await call.to_end()


async def test_loads(stub: vllm_grpc.VllmEngineStub) -> None:
    calls = [Call(stub, request([10] * 20, max_tokens=200)) for _ in range(MAX_NUM_SEQS + 2)]

    async def all_are_there() -> bool:
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
        return load.num_total_reqs == len(calls) and load.num_running_reqs == MAX_NUM_SEQS

    assert await eventually(all_are_there, 5)
    answer = await stub.GetLoads(vllm.GetLoadsRequest())
    (load,) = answer.loads
    assert answer.dp_rank_count == 1
    assert (load.num_running_reqs, load.num_waiting_reqs) == (MAX_NUM_SEQS, 2)
    assert load.num_total_reqs == MAX_NUM_SEQS + 2
    assert load.utilization == 1
    assert load.max_running_requests == MAX_NUM_SEQS
    assert load.num_used_tokens >= MAX_NUM_SEQS * BLOCK_SIZE
    assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
    for call in calls:
        await call.to_end()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_throughput_is_an_average_since_an_earlier_report() -> None:
    now = 100.0
    reports = LoadReports(clock=lambda: now)

    def rate(tokens: int) -> float:
        stats = engine_pb2.GetStatsResponse(generation_tokens=tokens)
        return reports.report(toy_info(), stats).loads[0].gen_throughput

    now += 2
    assert rate(200) == 100
    now += 0.1  # too short for an average of its own
    assert rate(290) == 100
    now += 0.9
    assert rate(250) == 50


async def test_the_tokenizer_comes_whole(
    stub: vllm_grpc.VllmEngineStub, byte_model_dir: Path
) -> None:
    chunks = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert all(not chunk.sha256 for chunk in chunks[:-1])
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = {"tokenizer.json", "config.json", "generation_config.json", "chat_template.jinja"}
        assert set(archive.namelist()) == names
        for name in names:
            assert archive.read(name) == (byte_model_dir / name).read_bytes()
    again = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
    assert again == chunks


async def test_a_model_without_a_tokenizer() -> None:
    with engine("--max-num-seqs", "2") as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = vllm_grpc.VllmEngineStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetTokenizer(common.GetTokenizerRequest()).read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert (await stub.GetModelInfo(vllm.GetModelInfoRequest())).tokenizer_path == ""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", vllm.EmbedRequest()),
        ("FlushCache", common.FlushCacheRequest()),
        ("StartProfile", common.StartProfileRequest()),
        ("StopProfile", common.StopProfileRequest()),
    ],
)
async def test_methods_that_the_engine_does_not_have(
    stub: vllm_grpc.VllmEngineStub, method: str, message: object
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(stub, method)(message)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in (refused.value.details() or "")


def test_without_the_stubs_the_engine_serves_without_the_service() -> None:
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)\n"
        "sys.modules['smg_grpc_proto'] = None\n"
        "from millstream.engine.vllm_dialect import find_dialect\n"
        "print(find_dialect())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, found = done.stdout.splitlines()
    assert "pip install smg-grpc-proto" in line
    assert found == "None"


def test_stubs_that_do_not_load_are_said_to(tmp_path: Path) -> None:
    """As those that were made for a newer grpcio."""
    package = tmp_path / "smg_grpc_proto"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('made for\\na newer grpcio')")
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from millstream.engine.vllm_dialect import find_dialect\n"
        "print(find_dialect())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, found = done.stdout.splitlines()
    assert "made for a newer grpcio" in line
    assert found == "None"
