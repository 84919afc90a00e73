"""The fork server: a process that has torch imported, which ranks are forked from."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading

from .._torch import TCPStore

# What test files import and takes long: what the parent has of it is imported once, before ranks are forked.
_SLOW_IMPORTS = ("pytest", "hypothesis", "torch._dynamo", "torch.testing._internal.common_methods_invocations")


class ForkServer:
    """The process that ranks are forked from; one per parent, started with the first pool.

    Attributes:
        parent: process id of the parent.
        process: the server.
        store: the TCPStore of the parent, under which all its pools form their default groups.
    """

    _own: ForkServer | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.parent: int = os.getpid()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # local ranks need no host name that resolves
        package = __name__.rpartition(".")[0]
        preload = [name for name in _SLOW_IMPORTS if name in sys.modules]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", f"from {package}.worker import serve_forks; serve_forks({preload!r})"],
            stdin=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self.store: TCPStore = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        atexit.register(self.close)

    @classmethod
    def get(cls) -> ForkServer:
        """The fork server of this process, alive."""
        with cls._lock:
            if cls._own is None or cls._own.parent != os.getpid() or cls._own.process.poll() is not None:
                cls._own = cls()
            return cls._own

    def fork(self, **order: object) -> None:
        """Fork a rank; `order` are the arguments of `worker._run_rank`."""
        assert self.process.stdin is not None, "opened with a pipe"
        with self._lock:  # pools of several threads
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the server and its ranks."""
        if self.parent == os.getpid() and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
