"""The filter, loaded into the real kernel: in a child that then tries things."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

from atoll.engines.host.confinement import bpf
from atoll.engines.host.confinement.seccomp import default_profile
from needs import not_applicable

PRELUDE = """
import ctypes, errno, os, socket, sys, threading
code = bytes.fromhex(sys.argv[1])
C = ctypes.CDLL(None, use_errno=True)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
def lock():
    assert C.prctl(38, 1, 0, 0, 0) == 0
    assert C.prctl(22, 2, ctypes.byref(Program(len(code) // 8, code)), 0, 0) == 0
def refused(number, *arguments):
    answer = C.syscall(ctypes.c_long(number), *[ctypes.c_void_p(argument) for argument in arguments])
    return errno.errorcode.get(ctypes.get_errno()) if answer < 0 else "OK"
"""


def inside(body: str) -> subprocess.CompletedProcess[str]:
    if platform.machine() != "x86_64":
        not_applicable("the numbers below are those of x86-64")
    code = bpf.assemble(default_profile(), "x86_64").hex()
    script = PRELUDE + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script, code], capture_output=True, text=True, timeout=30, check=False)


def test_ordinary_programs_run() -> None:
    done = inside("""
        lock()
        thread = threading.Thread(target=print, args=("thread",))
        thread.start()
        thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), socket.socket().fileno() > 0)
        import subprocess
        print(subprocess.run(["true"]).returncode)
    """)
    assert done.stdout.split() == ["thread", "7", "True", "0"], done.stderr


def test_dangerous_calls_are_refused() -> None:
    done = inside("""
        lock()
        print(refused(272, 0x10000000), refused(435, 0, 0), refused(425, 4, 0), refused(101, 0), refused(161, 0))
        print(refused(41, 38, 5, 0), refused(41, 40, 1, 0), refused(41, 17, 3, 0), refused(41, 16, 3, 12))
        print(refused(9999))
    """)
    expected = "EPERM ENOSYS ENOSYS EPERM EPERM EPERM EPERM EPERM EPERM ENOSYS"
    assert done.stdout.split() == expected.split(), done.stderr


def test_x32_kills_the_whole_process() -> None:
    done = inside("""
        lock()
        print("before", flush=True)
        refused(0x40000000 + 39)
        print("after", flush=True)
    """)
    assert done.stdout.split() == ["before"]
    assert done.returncode == -31
