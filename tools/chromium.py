"""A headless Chromium for `browse.py`: one of this machine, or npm's `@sparticuz/chromium`.

npm's is unpacked under `.nox`.

The package carries a Chromium for Linux on x86-64, the libraries that bare machines lack, and a
font, so that neither root nor a display is needed. It is driven by the DevTools protocol over two
pipes: JSON messages, each ended by a zero.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

CACHE = Path(__file__).parent.parent / ".nox" / "browser"
INSTALLED = ("chromium", "chromium-browser", "google-chrome")
PACKAGE = "@sparticuz/chromium@147.0.0"
FLAGS = (
    "--headless=shell",
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><include ignore_missing="yes">/etc/fonts/fonts.conf</include>
<dir>{home}/fonts</dir><cachedir>{home}/font-cache</cachedir></fontconfig>
"""
DECOMPRESS = """
const fs = require("fs"), zlib = require("zlib"), [source, target] = process.argv.slice(1);
require("stream").pipeline(
    fs.createReadStream(source), zlib.createBrotliDecompress(), fs.createWriteStream(target),
    error => { if (error) throw error });
"""


class NoBrowserError(Exception):
    """Why no Chromium runs on this machine."""


def find() -> tuple[Path, dict[str, str]]:
    """The program to run and the environment variables that it needs.

    Raises:
        NoBrowserError: none is installed, and none could be fetched.
    """
    installed = next(filter(None, map(shutil.which, INSTALLED)), None)
    if installed is not None:
        return Path(installed), {}
    if not (CACHE / "complete").exists():
        _fetch()
    libraries = os.pathsep.join(
        filter(None, (str(CACHE / "lib"), os.environ.get("LD_LIBRARY_PATH")))
    )
    return CACHE / "chromium", {
        "LD_LIBRARY_PATH": libraries,
        "FONTCONFIG_FILE": str(CACHE / "fonts.conf"),
    }


def _fetch() -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NoBrowserError(
            f"none of {', '.join(INSTALLED)} is installed; npm has one for Linux on x86-64 only"
        )
    if npm is None or node is None:
        raise NoBrowserError(
            f"none of {', '.join(INSTALLED)} is installed, nor npm, which could fetch one"
        )
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True)
    try:
        pack = [npm, "pack", "--silent", PACKAGE]
        subprocess.run(pack, cwd=CACHE, check=True, capture_output=True, text=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NoBrowserError(
            f"none of {', '.join(INSTALLED)} is installed, and npm did not get {PACKAGE}"
        ) from error
    (archive,) = CACHE.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(CACHE, filter="data")
    for name in ("chromium", "al2023.tar", "fonts.tar"):
        source = CACHE / "package" / "bin" / f"{name}.br"
        subprocess.run([node, "-e", DECOMPRESS, str(source), str(CACHE / name)], check=True)
        if name.endswith(".tar"):
            with tarfile.open(CACHE / name) as packed:
                packed.extractall(CACHE, filter="data")
            (CACHE / name).unlink()
    shutil.rmtree(CACHE / "package")
    archive.unlink()
    (CACHE / "chromium").chmod(0o755)
    (CACHE / "fonts.conf").write_text(FONTS.format(home=CACHE))
    (CACHE / "complete").touch()


class Chromium:
    """A running browser with one tab; a context manager, which ends it.

    Args:
        program: the browser.
        variables: environment variables that it needs beside those of this process.

    Raises:
        NoBrowserError: on entry, if it does not start.
    """

    def __init__(self, program: Path, variables: dict[str, str]) -> None:
        self._profile = TemporaryDirectory(ignore_cleanup_errors=True)
        ends = [*os.pipe(), *os.pipe()]
        # In the browser 3 is read and 4 written: from numbers that these two do not overwrite.
        reads, self._write, self._read, writes = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends
        )
        moved = f"os.dup2({reads}, 3); os.dup2({writes}, 4)"
        run = f"import os, sys; {moved}; os.execv(sys.argv[1], sys.argv[1:])"
        flags = [*FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._program = program
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", run, str(program), *flags],
            pass_fds=(reads, writes),
            env={**os.environ, "HOME": self._profile.name, **variables},
            stderr=subprocess.DEVNULL,
        )
        for end in (*ends, reads, writes):
            os.close(end)
        self._received, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
        except (RuntimeError, OSError) as error:
            raise NoBrowserError(f"{self._program} does not start: {error}") from error
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol.

        Raises:
            RuntimeError: the browser answered with an error.
            TimeoutError: it did not answer in a minute.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda one: one.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, address: str) -> None:
        """Show a page, and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._until(lambda one: one.get("method") == "Page.loadEventFired")

    def view(self, width: int, height: int, scheme: str) -> None:
        """Show the page at a size, in the `light` or the `dark` scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def _until(self, wanted: Any) -> dict[str, Any]:
        """The first message that is wanted; events that come before are appended to `events`."""
        deadline = time.monotonic() + 60
        while True:
            text, end, rest = self._received.partition(b"\0")
            if end:
                self._received = rest
                message: dict[str, Any] = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    return message
                continue
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError(f"the browser ended, with status {self._process.wait()}")
            self._received += received
