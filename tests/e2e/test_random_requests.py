"""Random combinations of every sampling field's values, good and bad ones, on one stream."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from tests.field_matrix import engine_rules
from tests.field_matrix.values import Json, fields_of, values_of

from millstream.client import Client
from millstream.rpc.errors import EngineFault, EngineUnavailable, MillstreamError, from_status
from millstream.v1 import engine_pb2, engine_pb2_grpc

VOCAB_SIZE, MAX_MODEL_LEN = 49152, 8192  # of the default model
_SAMPLING = "submit.sampling."
_GRAMMARS = ("json_schema", "json_object", "regex", "choice", "grammar")
_FIELDS = dict(fields_of(engine_pb2.GenerateRequest.DESCRIPTOR))
_RULES = engine_rules.rules(VOCAB_SIZE, MAX_MODEL_LEN)


def _choices() -> dict[str, list[Json]]:
    """Good values of each field of SamplingParams, short ones; and some that are bad."""
    choices: dict[str, list[Json]] = {}
    for path, rule in _RULES.items():
        name = path.removeprefix(_SAMPLING)
        if path.startswith(_SAMPLING) and "." not in name:
            values = [*values_of(_FIELDS[path]), *rule.more]
            choices[name] = [value for value in values if len(str(value)) < 1000]
    choices["bad_words"] = [[], [{"token_ids": [30]}], [{"token_ids": [7042, 30]}]]
    choices["choice"] = [{"values": ["a", "bc"]}]
    choices["n"] = [1, 2, 3]
    choices["max_tokens"] = [1, 2, 5]
    choices["min_tokens"] = [0, 1, 2]
    return choices


def _sampling(rng: random.Random, choices: dict[str, list[Json]]) -> Json:
    """Some fields, each with a good value but one in twenty."""
    names = rng.sample(sorted(set(choices) - set(_GRAMMARS)), rng.randint(0, 8))
    if rng.random() < 0.3:
        names.append(rng.choice(_GRAMMARS))
    sampling: dict[str, Json] = {"max_tokens": 3}
    for name in names:
        good = [value for value in choices[name] if _RULES[_SAMPLING + name].good(value)]
        usable = choices[name] if rng.random() < 0.05 or not good else good
        sampling[name] = rng.choice(usable)
    return sampling


@pytest.mark.parametrize("seed", [0])  # more seeds find more; one takes about five seconds
def test_random_combinations(default_client: Client, seed: int) -> None:
    rng = random.Random(seed)
    choices = _choices()
    submissions = [
        {
            "handle": 10 * (number + 1),
            "token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))],
            "sampling": _sampling(rng, choices),
            "priority": rng.choice([-1, 0, 5]),
        }
        for number in range(100)
    ]
    request = json_format.ParseDict({"submit": submissions}, engine_pb2.GenerateRequest())
    ended, refused = _run(default_client, request)
    handles = {one.handle for one in request.submit}
    assert {handle // 10 * 10 for handle in ended} | set(refused) == handles
    assert len(ended) > 50, "most of them are good"
    for handle, error in refused.items():
        assert not isinstance(error, EngineFault | EngineUnavailable), f"{handle}: {error!r}"
        assert error.field, f"{handle}: {error!r} names no field"
    _check_outputs(request, ended)
    with grpc.insecure_channel(str(default_client.engine_target)) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        stats = stub.GetStats(engine_pb2.GetStatsRequest())
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.kv_blocks_used == 0


def _run(
    client: Client, request: engine_pb2.GenerateRequest
) -> tuple[dict[int, list[int]], dict[int, MillstreamError]]:
    """By handle: the tokens of those that ended well, and why others were refused."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, list[int]] = {}
    refused: dict[int, MillstreamError] = {}
    with grpc.insecure_channel(str(client.engine_target)) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        for message in stub.Generate(iter([request]), timeout=120):
            for rejected in message.rejected:
                refused[rejected.handle] = from_status(rejected.status)
            output, start = message.output, 0
            for handle, count in zip(
                output.handles, output.counts or [1] * len(output.handles), strict=True
            ):
                tokens.setdefault(handle, []).extend(output.token_ids[start : start + count])
                start += count
            for finished in message.finished:
                assert finished.handle not in ended
                assert not finished.HasField("status"), finished
                ended[finished.handle] = tokens[finished.handle]
    return ended, refused


def _check_outputs(request: engine_pb2.GenerateRequest, ended: dict[int, list[int]]) -> None:
    for submission in request.submit:
        sampling = submission.sampling
        for handle in range(submission.handle, submission.handle + max(1, sampling.n)):
            if handle not in ended:
                continue
            token_ids = ended[handle]
            assert 1 <= len(token_ids) <= sampling.max_tokens
            assert all(token_id < VOCAB_SIZE for token_id in token_ids)
            free = sampling.WhichOneof("structured_output") is None
            if sampling.allowed_token_ids and free and not sampling.bad_words:
                assert set(token_ids) <= set(sampling.allowed_token_ids), submission
