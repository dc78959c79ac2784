"""Job, batch and worker ids: UUID version 7 (RFC 9562), whose text order is their order in time."""

from __future__ import annotations

import time
from collections.abc import Callable

from models_db.entropy import random_bytes

_NS_PER_MS = 1_000_000


def uuid7(clock_ns: Callable[[], int] = time.time_ns, entropy: Callable[[int], bytes] = random_bytes) -> str:
    """A new id as 36 characters of lower-case text.

    The 12 bits after the milliseconds hold the fraction of the millisecond (method 3 of RFC 9562, section 6.2),
    so ids made in a row sort in that order far more often than chance, and new rows land at the end of an index.
    """
    nanoseconds = clock_ns()
    milliseconds, rest = divmod(nanoseconds, _NS_PER_MS)
    fraction = rest * 4096 // _NS_PER_MS
    random_bits = int.from_bytes(entropy(8), "big") & ((1 << 62) - 1)
    value = (milliseconds & ((1 << 48) - 1)) << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | random_bits
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
