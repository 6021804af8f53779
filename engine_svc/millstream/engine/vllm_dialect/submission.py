"""A vLLM GenerateRequest as a millstream.v1 submission, and errors about one as about the other.

Every field is either translated, or has nothing to say about token ids, or is refused by its name.
A plain proto number that is unset is 0: off for top_k and the like; for top_p and
repetition_penalty, of which 0 is no value, it is unset. Values are checked where all are, by
validation/submissions.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from millstream.engine.validation.checks import check_prompt_length, invalid
from millstream.rpc.errors import InvalidArgument, MillstreamError, Unsupported
from millstream.rpc.sampling_params import MAX_STOP_CHARS
from millstream.rpc.values import UINT64_MAX
from millstream.v1 import engine_pb2

# Of a vLLM message, the fields that the engine does not have. They are refused when they are set.
_REFUSED = {
    "text": "send tokenized.input_ids: text is a tokenizer's business",
    "kv_transfer_params": "no disaggregated serving",
    "kv_transfer_params_json": "no disaggregated serving",
    "mm_inputs": "text models only",
    "extra_mm_inputs": "text models only",
    "media_refs": "text models only",
}
_SAME_NUMBERS = ("min_p", "frequency_penalty", "presence_penalty", "min_tokens")
_ZERO_IS_UNSET = ("top_p", "repetition_penalty")
_SAME_CONSTRAINTS = ("json_schema", "regex", "grammar")
_TOP_K_MAX = 2**31 - 1
_MOST_BIASES = 2**20  # no vocabulary is so large


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """What the front end looks for in the text of the output."""

    strings: tuple[str, ...]
    min_tokens: int  # a match counts from this token on
    skip_special_tokens: bool


def to_submission(
    request: vllm.GenerateRequest, *, max_model_len: int
) -> tuple[engine_pb2.Submission, StopStrings]:
    """The submission with handle 0, and the stop strings, which the engine itself cannot see.
    Raises Unsupported or InvalidArgument, naming the field as the request does."""
    for name, why in _REFUSED.items():
        if _is_set(request, name):
            raise Unsupported(f"{name}: {why}", field=name)
    if request.data_parallel_rank:
        raise Unsupported("data_parallel_rank: only 0, there is one", field="data_parallel_rank")
    params = request.sampling_params
    submission = engine_pb2.Submission(
        handle=0,
        request_id=request.request_id,
        token_ids=_prompt(request, max_model_len),
        sampling=_sampling(params),
    )
    return submission, _stop_strings(params)


def in_vllm_terms(error: MillstreamError) -> MillstreamError:
    """An error about a submission, naming the field as a vLLM request does."""
    if error.field is None:
        return error
    field = error.field
    if field == "token_ids":
        field = "tokenized.input_ids"
    elif field.startswith("sampling."):
        field = field.replace("sampling.", "sampling_params.", 1)
    message = error.message.replace(error.field, field, 1)
    return type(error)(message, field=field, retry_after_s=error.retry_after_s)


def _is_set(message: Any, name: str) -> bool:
    value = getattr(message, name)
    repeated = name == "extra_mm_inputs"
    return bool(value) if repeated else message.HasField(name)


def _prompt(request: vllm.GenerateRequest, max_model_len: int) -> list[int]:
    """The prompt's ids; of a prompt that is to be truncated, the last ones."""
    token_ids, params = request.tokenized.input_ids, request.sampling_params
    keep = len(token_ids)
    if params.HasField("truncate_prompt_tokens"):
        keep = params.truncate_prompt_tokens
        if keep == -1:  # as many as the model takes beside the output
            output = params.max_tokens if params.HasField("max_tokens") else 1
            keep = max(1, max_model_len - output)
        if keep < 1:
            raise _invalid("truncate_prompt_tokens", "-1, or at least 1", keep)
    start = max(0, len(token_ids) - keep)
    check_prompt_length(len(token_ids) - start, max_model_len)  # before they are copied
    return list(token_ids[start:])


def _sampling(params: vllm.SamplingParams) -> engine_pb2.SamplingParams:
    """Left out are the fields about text (stop, include_stop_str_in_output, skip_special_tokens,
    spaces_between_special_tokens), and grammar_from_first_token: a constraint always starts there.
    """
    ours = engine_pb2.SamplingParams(
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logit_bias=_logit_bias(params),
    )
    if params.HasField("temperature"):
        ours.temperature = params.temperature
    for name in _SAME_NUMBERS:
        setattr(ours, name, getattr(params, name))
    for name in _ZERO_IS_UNSET:
        if getattr(params, name):
            setattr(ours, name, getattr(params, name))
    ours.top_k = min(params.top_k, _TOP_K_MAX)  # off either way: no vocabulary is so large
    if params.HasField("max_tokens"):
        ours.max_tokens = params.max_tokens
    if params.n > 1:
        ours.n = params.n
    if params.HasField("seed"):  # any 32 bits: a negative one is a seed of its own
        ours.seed = params.seed & UINT64_MAX
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            value = getattr(params, name)
            if value < 0:
                raise Unsupported(
                    f"sampling_params.{name}: of all tokens is too many; 0 or more",
                    field=f"sampling_params.{name}",
                )
            setattr(ours, name, value)
    _constrain(ours, params)
    return ours


def _logit_bias(params: vllm.SamplingParams) -> dict[int, float]:
    if len(params.logit_bias) > _MOST_BIASES:
        raise _invalid("logit_bias", f"at most {_MOST_BIASES} ids", len(params.logit_bias))
    for token_id in params.logit_bias:
        if token_id < 0:
            raise _invalid("logit_bias", "token ids in the vocabulary", token_id)
    return dict(params.logit_bias)


def _constrain(ours: engine_pb2.SamplingParams, params: vllm.SamplingParams) -> None:
    kind = params.WhichOneof("constraint")
    if kind in _SAME_CONSTRAINTS:
        setattr(ours, kind, getattr(params, kind))
    elif kind == "json_object":
        ours.json_object = params.json_object
    elif kind == "choice":
        ours.choice.values.extend(params.choice.choices)
        ours.choice.SetInParent()
    elif kind is not None:
        field = f"sampling_params.{kind}"
        raise Unsupported(f"{field}: not among the constraints that the engine has", field=field)


def _stop_strings(params: vllm.SamplingParams) -> StopStrings:
    if len(params.stop) > MAX_STOP_CHARS:
        raise _invalid("stop", f"at most {MAX_STOP_CHARS} strings", len(params.stop))
    strings = tuple(params.stop)
    if "" in strings:
        raise InvalidArgument(
            "sampling_params.stop: non-empty strings only", field="sampling_params.stop"
        )
    if (size := sum(map(len, strings))) > MAX_STOP_CHARS:
        raise _invalid("stop", f"at most {MAX_STOP_CHARS} characters together", size)
    return StopStrings(
        strings=strings,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
    )


def _invalid(name: str, wanted: str, value: object) -> InvalidArgument:
    return invalid(f"sampling_params.{name}", wanted, value)
