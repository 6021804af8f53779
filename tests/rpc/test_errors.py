"""The error table: each kind survives the wire, nothing internal leaks, foreign statuses map."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from millstream.rpc import errors


@pytest.mark.parametrize("kind", errors.BY_REASON.values())
def test_every_kind_survives_a_status(kind: type[errors.MillstreamError]) -> None:
    back = errors.from_status(errors.to_status(kind("why", field="a.b", retry_after_s=1.5)))
    assert type(back) is kind
    assert (back.message, back.field, back.retry_after_s) == ("why", "a.b", 1.5)


def test_reasons_are_unique_and_the_table_is_grpc_mds() -> None:
    codes = {reason: kind.code.name for reason, kind in errors.BY_REASON.items()}
    assert codes == {
        "INVALID_ARGUMENT": "INVALID_ARGUMENT",
        "PROMPT_TOO_LONG": "OUT_OF_RANGE",
        "NEVER_FITS": "RESOURCE_EXHAUSTED",
        "QUEUE_FULL": "RESOURCE_EXHAUSTED",
        "MESSAGE_TOO_LARGE": "RESOURCE_EXHAUSTED",
        "DUPLICATE_HANDLE": "ALREADY_EXISTS",
        "UNKNOWN_HANDLE": "NOT_FOUND",
        "FELL_BEHIND": "DATA_LOSS",
        "CURSOR_EXPIRED": "OUT_OF_RANGE",
        "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
        "CANCELLED": "CANCELLED",
        "NO_CHAT_TEMPLATE": "FAILED_PRECONDITION",
        "NO_TOKENIZER": "FAILED_PRECONDITION",
        "FINGERPRINT_MISMATCH": "FAILED_PRECONDITION",
        "UNSUPPORTED": "UNIMPLEMENTED",
        "INTERNAL": "INTERNAL",
        "UNAVAILABLE": "UNAVAILABLE",
    }


@pytest.mark.parametrize("text", ["x" * 5000, "🙂" * 5000, "a" + "é" * 5000])
def test_a_long_message_is_cut_to_what_metadata_takes(text: str) -> None:
    status = errors.to_status(errors.InvalidArgument(text, field="f"))
    assert text.startswith(status.message.removesuffix("..."))
    assert len(status.message.encode()) <= errors.MAX_MESSAGE_BYTES + 3
    # In grpc-message each byte may take three, in grpc-status-details-bin base64 four thirds.
    assert 3 * len(status.message.encode()) + 4 / 3 * status.ByteSize() < 8000


def test_a_lone_surrogate_in_a_message_does_no_harm() -> None:
    assert errors.to_status(errors.InvalidArgument("not \ud83d")).message == "not \\ud83d"


def test_details() -> None:
    status = errors.to_status(errors.InvalidArgument("f: bad", field="f"))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "millstream")
    assert status.details[1].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "f"
    assert len(status.details) == 2
    assert len(errors.to_status(errors.EngineFault("x")).details) == 1


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret"), RuntimeError()])
def test_a_bare_exception_is_internal_and_keeps_its_text(error: Exception) -> None:
    status = errors.to_status(error)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in status.message


def test_foreign_statuses() -> None:
    def kind_of(code: int) -> type[errors.MillstreamError]:
        return type(errors.from_status(status_pb2.Status(code=code, message="m")))

    assert kind_of(3) is errors.InvalidArgument
    assert kind_of(8) is errors.MessageTooLarge
    assert kind_of(13) is errors.EngineFault
    assert kind_of(14) is errors.EngineUnavailable
    assert kind_of(2) is errors.EngineFault
    assert kind_of(999) is errors.EngineFault


class FailedRpc(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self.code = lambda: code
        self.details = lambda: details
        self.trailing_metadata = lambda: trailing


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Received message larger than max (5 vs. 4)",
            errors.MessageTooLarge,
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Bandwidth exhausted", errors.QueueFull),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", errors.EngineUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded),
    ],
)
def test_grpcs_own_failures(
    code: grpc.StatusCode, details: str, kind: type[errors.MillstreamError]
) -> None:
    error = errors.from_rpc_error(FailedRpc(code, details))
    assert type(error) is kind
    assert error.message == details


def test_our_status_in_trailing_metadata_wins() -> None:
    status = errors.to_status(errors.QueueFull("later", retry_after_s=2)).SerializeToString()
    trailing = (("other", "x"), ("grpc-status-details-bin", status))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    error = errors.from_rpc_error(FailedRpc(code, "later", trailing))
    assert isinstance(error, errors.QueueFull)
    assert error.retry_after_s == 2


def test_kinds_are_what_python_programs_catch() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.EngineUnavailable, ConnectionError)
    assert issubclass(errors.Unsupported, NotImplementedError)
