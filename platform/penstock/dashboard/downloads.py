"""Files on their way to a browser, a piece at a time."""

from collections.abc import AsyncIterator
from typing import BinaryIO

from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse
from django.utils.http import content_disposition_header

CHUNK_BYTES = 256 * 1024


def download(stream: BinaryIO, *, filename: str, size_bytes: int, content_type: str) -> StreamingHttpResponse:
    """Sends `stream` and closes it. Django would read a synchronous iterator whole before sending the first byte."""
    response = StreamingHttpResponse(_chunks(stream), content_type=content_type)
    response["Content-Length"] = str(size_bytes)
    response["Content-Disposition"] = content_disposition_header(True, filename) or "attachment"
    return response


async def _chunks(stream: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while chunk := await sync_to_async(stream.read, thread_sensitive=False)(CHUNK_BYTES):
            yield chunk
    finally:
        stream.close()
