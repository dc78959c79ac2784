"""The file of a bulk run, opened: plain or gzip, and refused where it is packed or encoded in another way."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, cast

from backend.api import RequestError

STDIN = "-"
_GZIP = b"\x1f\x8b"
_REFUSED = {
    b"\x28\xb5\x2f\xfd": "is compressed by zstd. Unpack it, or use gzip",
    b"\xfd7zXZ\x00": "is compressed by xz. Unpack it, or use gzip",
    b"BZh91AY&SY": "is compressed by bzip2. Unpack it, or use gzip",
    b"PK\x03\x04": "is a ZIP archive or a workbook. Unpack it, or save the table as CSV",
    b"\xff\xfe": "is UTF-16. Re-encode it as UTF-8",
    b"\xfe\xff": "is UTF-16. Re-encode it as UTF-8",
}


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """The input, unpacked and seekable; ``-`` is standard input, kept in a temporary file.

    Raises:
        RequestError: it cannot be read.
    """
    with ExitStack() as stack:
        try:
            if path == STDIN:
                file: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(sys.stdin.buffer, file)
                file.seek(0)
            else:
                file = stack.enter_context(open(path, "rb"))
                if not file.seekable():
                    fix = "Save it in a file, or give - and pipe it in"
                    raise RequestError(f"{path} is a pipe, which is read once only", field="INPUT", fix=fix)
            begins = file.read(16)
            file.seek(0)
        except OSError as error:
            if path == STDIN:
                raise  # it is the temporary file that cannot be written
            raise RequestError(
                f"{path} cannot be read ({error.strerror})", field="INPUT", fix="Correct the path"
            ) from error
        for magic, why in _REFUSED.items():
            if begins.startswith(magic):
                what, _, fix = why.partition(". ")
                raise RequestError(f"{path} {what}", field="INPUT", fix=fix)
        if begins.startswith(_GZIP):
            file = stack.enter_context(cast(IO[bytes], io.BufferedReader(_Unpacked(path, file), 1 << 17)))
        yield file


def digest(file: IO[bytes]) -> str:
    """SHA-256 of the whole file, which is then at its beginning again."""
    file.seek(0)
    value = hashlib.sha256()
    while block := file.read(1 << 20):
        value.update(block)
    file.seek(0)
    return value.hexdigest()


class _Unpacked(io.RawIOBase):
    """What a gzip file holds; the complaint about a broken one names it."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self._path = path
        self._inside = gzip.GzipFile(fileobj=file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            block = self._inside.read1(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise RequestError(
                f"{self._path} is a broken gzip file ({error})", field="INPUT", fix="Make it again"
            ) from None
        buffer[: len(block)] = block
        return len(block)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._inside.seek(offset, whence)

    def tell(self) -> int:
        return self._inside.tell()
