"""The one place where a submission becomes a Request: all checks and defaults of engine.proto.

Both the gRPC front end and the in-process LLM come through here, so what the scheduler gets is
never out of range. Errors name the bad field by its proto path ("sampling.top_p", "token_ids").
"""

from __future__ import annotations

from millstream.engine.plan import RunnerInfo
from millstream.engine.request import Request, samples_of
from millstream.engine.validation.checks import check_prompt_length, check_vocabulary, invalid
from millstream.engine.validation.sampling import check_lengths, check_scalars, resolve_sampling
from millstream.rpc.errors import InvalidArgument
from millstream.v1 import engine_pb2

MAX_NAME_LENGTH = 1024  # of request_id and cache_salt, in characters
_NO_DEFAULTS = engine_pb2.SamplingParams()


def to_requests(
    submission: engine_pb2.Submission,
    *,
    key: int,
    info: RunnerInfo,
    random_seed: int,
    token_ids: list[int] | None = None,
    defaults: engine_pb2.SamplingParams = _NO_DEFAULTS,
    client: int = 0,
) -> list[Request]:
    """The submission as the scheduler takes it: a request for each sample, with consecutive keys
    and seeds. `random_seed` (64 bits) serves if it sets no seed, `defaults` for the fields of
    sampling that it does not set; the documented defaults come last. `token_ids`, none below 0,
    are the prompt where the submission does not carry it; nobody else may change them.

    Raises InvalidArgument (a bad value), Unsupported (a field the engine does not do yet),
    PromptTooLong (no room for output within max_model_len) or NeverFits (larger than the KV pool).
    """
    check_samples(submission)
    if submission.HasField("timeout_ms") and submission.timeout_ms == 0:
        raise invalid("timeout_ms", "at least 1", 0)
    for field in ("request_id", "cache_salt"):
        length = len(getattr(submission, field))
        if length > MAX_NAME_LENGTH:
            raise invalid(field, f"at most {MAX_NAME_LENGTH} characters", length)
    prompt = submission.token_ids if token_ids is None else token_ids
    check_prompt_length(len(prompt), info.max_model_len)  # before it is copied
    if token_ids is None:
        token_ids = submission.token_ids[:]  # list() takes a third longer
    _check_prompt(token_ids, info)
    check_lengths(submission.sampling, info)
    params = engine_pb2.SamplingParams()
    params.MergeFrom(defaults)
    params.MergeFrom(submission.sampling)  # a field that is set here wins
    sampling = resolve_sampling(
        params, prompt_tokens=len(token_ids), info=info, random_seed=random_seed
    )
    first = Request(
        key=key,
        token_ids=token_ids,
        sampling=sampling,
        request_id=submission.request_id,
        cache_salt=submission.cache_salt,
        priority=submission.priority,
        client=client,
    )
    return samples_of(first)


def check_samples(submission: engine_pb2.Submission) -> int:
    """How many samples it asks for. Raises InvalidArgument."""
    sampling = submission.sampling
    if not sampling.HasField("n"):
        return 1
    check_scalars(engine_pb2.SamplingParams(n=sampling.n))
    if submission.handle + sampling.n > 1 << 32:
        wanted = f"{sampling.n} samples take consecutive handles below 2**32"
        raise invalid("handle", wanted, submission.handle)
    return sampling.n


def _check_prompt(token_ids: list[int], info: RunnerInfo) -> None:
    if not token_ids:
        raise InvalidArgument("token_ids: at least one id, not an empty prompt", field="token_ids")
    check_vocabulary("token_ids", token_ids, info)
