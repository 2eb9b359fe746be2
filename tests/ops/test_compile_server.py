"""The processes that compile kernels, with statements in place of kernels: whatever these do, nobody waits for ever."""

import os
import sys
import threading
from contextlib import suppress

import pytest

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

from sigmasolver.ops import compile_server
from sigmasolver.ops.compile_server import CompileServer, NamedTarget


class Statements:
    """Compiling it runs the statements that are its arguments, in the process that would compile a kernel."""

    def preload(self, statements):
        if active_mode.get() is None:
            exec(f"import os, signal, time; {statements}")


statements = Statements()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """In a folder with modules of the same names as Python's, which are not on the path of this process."""
    for name in ("json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # Python ignores a path that is not a string
    monkeypatch.setattr(driver, "_active", NamedTarget(GPUTarget("cuda", 90, 32)))
    server = CompileServer()
    yield server
    server.close()


def compiles(server, what="pass"):
    """Whether `server` has run the statements; it must not take half a minute."""
    with suppress(FileNotFoundError):
        os.remove("ran")
    arguments = (__name__, "statements", f"open('ran', 'w').close(); {what}")
    thread = threading.Thread(target=server.compile, args=(arguments,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return os.path.exists("ran")


def test_server_survives_what_a_compilation_does(server):
    for what in ("pass", "raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)", "print('x' * 10**5)", "pass"):
        assert compiles(server, what)


@pytest.mark.parametrize("what", ["time.sleep(1000)", "os.kill(os.getsid(0), signal.SIGSTOP); time.sleep(1000)"])
def test_server_is_killed_after_the_limit(server, monkeypatch, what):
    assert compiles(server)
    monkeypatch.setattr(compile_server, "LIMIT", 4)
    assert compiles(server, what)
    assert not compiles(server)


def test_supervisor_that_cannot_fork_reports_the_end():
    """At a limit of the number of processes: the trainer compiles the kernel itself, at once."""
    reader, writer = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:

        def fail():
            raise BlockingIOError

        os.fork = fail
        compile_server._supervise(writer, 7, [])
    os.waitpid(supervisor, 0)
    os.close(writer)
    with open(reader) as reports:
        assert reports.read() == "7\n"


def test_nobody_waits_for_a_server_that_has_died(server):
    assert compiles(server, "os.kill(os.getsid(0), signal.SIGKILL)")
    assert not compiles(server)
