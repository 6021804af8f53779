"""The error table: reason <-> gRPC status code <-> Python exception. Both sides use it.

A service raises one of these exceptions (or sends `to_status(error)` for one request of a stream);
the client gets the same exception back from `from_status` or `from_rpc_error`. The reason travels
in google.rpc.ErrorInfo and is stable; messages are for people and may change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "millstream"
# A status travels three times over in metadata, of which gRPC takes 8 KiB: beyond that the caller
# would hear of the metadata instead.
MAX_MESSAGE_BYTES = 1000


class MillstreamError(Exception):
    """A failed request. `field` is the bad field's path ("sampling.top_p"), if there is one."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(MillstreamError, ValueError):
    """A field has a bad value; the message starts with the field's name."""

    reason = "INVALID_ARGUMENT"
    code = grpc.StatusCode.INVALID_ARGUMENT


class PromptTooLong(MillstreamError, ValueError):
    """The prompt leaves no room for output within max_model_len."""

    reason = "PROMPT_TOO_LONG"
    code = grpc.StatusCode.OUT_OF_RANGE


class NeverFits(MillstreamError):
    """The request needs more KV blocks than the engine has: trying again does not help."""

    reason = "NEVER_FITS"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class QueueFull(MillstreamError):
    """Too many requests wait; try again after `retry_after_s` seconds."""

    reason = "QUEUE_FULL"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class MessageTooLarge(MillstreamError):
    """A message is larger than the limit that both sides agreed on."""

    reason = "MESSAGE_TOO_LARGE"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DuplicateHandle(MillstreamError):
    """The handle names a live request of this stream; that request goes on."""

    reason = "DUPLICATE_HANDLE"
    code = grpc.StatusCode.ALREADY_EXISTS


class UnknownHandle(MillstreamError):
    """The handle names no open sequence of this stream."""

    reason = "UNKNOWN_HANDLE"
    code = grpc.StatusCode.NOT_FOUND


class FellBehind(MillstreamError):
    """A subscriber read too slowly, so events were lost; subscribe again from the start."""

    reason = "FELL_BEHIND"
    code = grpc.StatusCode.DATA_LOSS


class CursorExpired(MillstreamError):
    """The events from this number on are not kept; subscribe again from the start."""

    reason = "CURSOR_EXPIRED"
    code = grpc.StatusCode.OUT_OF_RANGE


class DeadlineExceeded(MillstreamError, TimeoutError):
    """The request's own time limit passed."""

    reason = "DEADLINE_EXCEEDED"
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(MillstreamError):
    """The request was cancelled."""

    reason = "CANCELLED"
    code = grpc.StatusCode.CANCELLED


class NoChatTemplate(MillstreamError):
    """The model has no chat template."""

    reason = "NO_CHAT_TEMPLATE"
    code = grpc.StatusCode.FAILED_PRECONDITION


class NoTokenizer(MillstreamError):
    """The engine's model has no tokenizer that structured output or stop strings could use."""

    reason = "NO_TOKENIZER"
    code = grpc.StatusCode.FAILED_PRECONDITION


class FingerprintMismatch(MillstreamError):
    """The tokenizer service serves another tokenizer than the engine's model has."""

    reason = "FINGERPRINT_MISMATCH"
    code = grpc.StatusCode.FAILED_PRECONDITION


class Unsupported(MillstreamError, NotImplementedError):
    """The engine knows the field but does not do it."""

    reason = "UNSUPPORTED"
    code = grpc.StatusCode.UNIMPLEMENTED


class EngineFault(MillstreamError):
    """The service failed; it is not the request's fault."""

    reason = "INTERNAL"
    code = grpc.StatusCode.INTERNAL


class EngineUnavailable(MillstreamError, ConnectionError):
    """The service is dead, starting or stopping."""

    reason = "UNAVAILABLE"
    code = grpc.StatusCode.UNAVAILABLE


_KINDS: tuple[type[MillstreamError], ...] = (
    InvalidArgument,
    PromptTooLong,
    NeverFits,
    QueueFull,
    MessageTooLarge,
    DuplicateHandle,
    UnknownHandle,
    FellBehind,
    CursorExpired,
    DeadlineExceeded,
    Cancelled,
    NoChatTemplate,
    NoTokenizer,
    FingerprintMismatch,
    Unsupported,
    EngineFault,
    EngineUnavailable,
)
BY_REASON: Mapping[str, type[MillstreamError]] = {kind.reason: kind for kind in _KINDS}
# For a status without our ErrorInfo (gRPC's own, or another server's): the kind that fits best.
_BY_CODE: Mapping[grpc.StatusCode, type[MillstreamError]] = {
    **{kind.code: kind for kind in reversed(_KINDS)},
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLarge,
    grpc.StatusCode.FAILED_PRECONDITION: MillstreamError,
    grpc.StatusCode.UNKNOWN: EngineFault,
}
# What gRPC itself says of a call that the other end has ended: CANCELLED, if a stopping server had
# not looked at it, and INTERNAL with this text, instead of the call's status, if it was written to.
_WRITTEN_TO_THE_END = "Internal error from Core"
_CODE_OF_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: BaseException) -> status_pb2.Status:
    """The google.rpc.Status of an error, with ErrorInfo, BadRequest and RetryInfo where they apply.

    Anything but a MillstreamError becomes INTERNAL and does not show its text. A long message is
    cut.
    """
    if not isinstance(error, MillstreamError):
        error = EngineFault("internal error; the service's log has it")
    message = _shown(error.message)
    metadata = {"field": error.field} if error.field else {}
    details = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapped = AnyMessage()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(code=error.code.value[0], message=message, details=packed)


def _shown(message: str) -> str:
    """What a status can carry of a message: so many bytes of UTF-8, without lone surrogates."""
    data = message.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        return data[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
    return data.decode()


def from_status(status: status_pb2.Status) -> MillstreamError:
    """The exception that `to_status` got; for a foreign status, the kind its code suggests."""
    kind = _BY_CODE.get(_CODE_OF_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN), MillstreamError)
    field: str | None = None
    retry_after_s: float | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            kind = BY_REASON.get(info.reason, kind)
            field = info.metadata.get("field")
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return kind(status.message, field=field, retry_after_s=retry_after_s)


def from_rpc_error(error: grpc.RpcError) -> MillstreamError:
    """The exception behind a failed RPC, sync or asyncio; not for one that was cancelled here."""
    code = error.code()
    details = error.details() or code.name
    trailing: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == "grpc-status-details-bin":
            return from_status(status_pb2.Status.FromString(value))
    if code is grpc.StatusCode.CANCELLED or details == _WRITTEN_TO_THE_END:
        return EngineUnavailable("the service ended the call; it may be stopping")
    kind = _BY_CODE.get(code, MillstreamError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not re.search("larger|size", details):
        kind = QueueFull
    return kind(details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends an RPC with the error's status; raises, as context.abort does."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status always raises")
