"""A wrong wall clock for one process, with its monotonic clock left right."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    const char *by = getenv("CHAOS_CLOCK_SHIFT_S");
    return by ? atol(by) : 0;
}
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void) zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


_SLEEPS = "import time; began = time.monotonic(); time.sleep(0.2); assert 0.1 < time.monotonic() - began < 5"


class NoClockShiftError(Exception):
    """Neither a C compiler nor a libfaketime that works is here."""


def shifted(seconds: int, folder: Path) -> dict[str, str]:
    """Variables that give a process a wall clock which is ``seconds`` ahead (or behind, when negative).

    Raises:
        NoClockShiftError: it cannot be done on this machine.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        return _with_shim(compiler, seconds, folder)
    # The second choice, because its 0.9.10 breaks ``time.sleep`` when the monotonic clock is to be left alone: a
    # worker whose threads cannot sleep is rightly held for dead.
    folders = ("/usr/lib", "/usr/lib/*", "/usr/lib64", "/usr/local/lib")
    for path in (path for folder in folders for path in glob.glob(f"{folder}/faketime/libfaketimeMT.so.1")):
        variables = {"LD_PRELOAD": path, "FAKETIME": f"{seconds:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        if _sleeps(variables):
            return variables
    raise NoClockShiftError("install a C compiler, or a faketime under which Python's time.sleep works")


def _with_shim(compiler: str, seconds: int, folder: Path) -> dict[str, str]:
    source, library = folder / "clock.c", folder / "clock.so"
    if not library.exists():  # it may be in use
        source.write_text(_SHIM)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoClockShiftError(
                f"{compiler} could not build the replacement of faketime: {done.stderr[-300:]}"
            )
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCK_SHIFT_S": str(seconds)}


def _sleeps(variables: dict[str, str]) -> bool:
    command = [sys.executable, "-c", _SLEEPS]
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, check=False, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
