"""A wrong wall clock for one process, with its monotonic clock left right."""

from __future__ import annotations

import glob
import shutil
import subprocess
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


class NoClockShiftError(Exception):
    """Neither libfaketime nor a C compiler is here."""


def shifted(seconds: int, folder: Path) -> dict[str, str]:
    """Variables that give a process a wall clock which is ``seconds`` ahead (or behind, when negative).

    Raises:
        NoClockShiftError: it cannot be done on this machine.
    """
    folders = ("/usr/lib", "/usr/lib/*", "/usr/lib64", "/usr/local/lib")
    if found := [path for folder in folders for path in glob.glob(f"{folder}/faketime/libfaketimeMT.so.1")]:
        return {"LD_PRELOAD": found[0], "FAKETIME": f"{seconds:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoClockShiftError("install faketime (apt-get install faketime) or a C compiler")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SHIM)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoClockShiftError(
            f"{compiler} could not build the replacement of faketime: {done.stderr[-300:]}"
        )
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCK_SHIFT_S": str(seconds)}
