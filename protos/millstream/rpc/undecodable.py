"""Requests whose bytes are no message, as of a client that sends text in another encoding than
UTF-8: INVALID_ARGUMENT. gRPC alone would say UNKNOWN and log a traceback of each."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millstream.rpc.errors import InvalidArgument, abort


def undecodable(what: str) -> InvalidArgument:
    """The error of a message that cannot be parsed."""
    return InvalidArgument(f"the bytes of {what} are no such message, or a text is not UTF-8")


class UndecodableRequests(grpc.aio.ServerInterceptor):
    """Takes care of methods with one request; a stream's own method gets the DecodeError."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        answer = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(answer):
            return handler
        decode = handler.request_deserializer

        async def decode_and_answer(data: bytes, context: Any) -> Any:
            try:
                request = decode(data)
            except DecodeError:
                await abort(context, undecodable(f"a request for {details.method}"))
            return await answer(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(decode_and_answer, response_serializer=handler.response_serializer)
