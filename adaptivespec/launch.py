"""Start a real SGLang server as a child process, wait until it answers, stop it with everything it started.

For the demo, the measurements and the tests; a user types the same command by hand.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adaptivespec.errors import AdaptiveSpecError, ConfigError
from adaptivespec.shapes import TreeShape

_GRACE_SECONDS = 3.0
DYING_SECONDS = 5  # a server closes its connections some time before it ends


class ServerFailedError(AdaptiveSpecError, RuntimeError):
    """The server ended, or did not answer in time. `log_tail` holds the last lines of its log."""

    def __init__(self, *, log_tail: str, **kwargs: str) -> None:
        super().__init__(**kwargs)
        self.log_tail = log_tail


def speculation_args(algorithm: str, draft: str | Path, shape: TreeShape | None = None) -> tuple[str, ...]:
    """Arguments of the launch command that choose an algorithm with its draft, and where given the tree shape."""
    args: tuple[str, ...] = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft))
    if shape is None:
        return args
    num_steps, topk, num_draft_tokens = map(str, shape.to_list())
    args += ("--speculative-num-steps", num_steps, "--speculative-eagle-topk", topk)
    return (*args, "--speculative-num-draft-tokens", num_draft_tokens)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_OWN_ARGUMENTS = ("--model-path", "--model", "--host", "--port")


class Server:
    """``python -m sglang.launch_server`` with these arguments, as a context manager.

    Args:
        model: ``--model-path``.
        args: further arguments, as on the command line; none of model, host and port.
        log: file for its output.
        env: variables added to this process's environment.
        timeout: seconds until it must answer.

    Raises:
        ConfigError: when ``args`` name what is chosen here.
        ServerFailedError: on entering, when it ends or does not answer in time.
    """

    def __init__(
        self, model: str | Path, args: list[str], *, log: Path, env: dict[str, str] | None = None, timeout: float = 300
    ) -> None:
        for word in args:
            if word.partition("=")[0] in _OWN_ARGUMENTS:
                raise ConfigError(
                    where="server arguments",
                    found=word,
                    expected=f"none of {', '.join(_OWN_ARGUMENTS)}, which are chosen here",
                    fix="leave it out",
                )
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *args]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.log = log
        self._env = {**os.environ, **(env or {})}
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process without waiting for it. It leads a process group of its own."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        """Wait until the server has warmed up and generates.

        Raises:
            ServerFailedError: it ended, or the time is over.
        """
        assert self._process is not None, "start() comes first"
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failed(f"a server that ended with code {self._process.returncode}")
            try:
                self.get("/health_generate", timeout=min(30, max(deadline - time.monotonic(), 1)))
                return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.25)
        raise self._failed(f"no answer within {self._timeout:.0f} s")

    def stop(self) -> None:
        """End the server and all its children, and wait until they are gone."""
        if self._process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < deadline and _group_lives(self._process):
                time.sleep(0.05)
        self._process.wait()
        self._process = None

    def exit_code(self) -> int | None:
        """The process's exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def get(self, path: str, timeout: float = 60) -> Any:
        """The answer to a GET: parsed where it is JSON, else text."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
            return _parsed(response.read())

    def post(self, path: str, body: Any, timeout: float = 600) -> Any:
        """The answer to a POST of JSON. Raises `urllib.error.HTTPError` for 4xx and 5xx."""
        with urllib.request.urlopen(self._request(path, body), timeout=timeout) as response:
            return _parsed(response.read())

    def stream(self, path: str, body: Any, timeout: float = 600) -> Iterator[Any]:
        """The events of the answer to a POST of JSON, each as it arrives. `timeout` is that of each event."""
        with urllib.request.urlopen(self._request(path, body), timeout=timeout) as response:
            for line in response:
                if line.startswith(b"data:") and (text := line.removeprefix(b"data:").strip()) != b"[DONE]":
                    yield json.loads(text)

    def resident_bytes(self) -> int:
        """Main memory of the server's processes now, shared pages counted once."""
        assert self._process is not None, "start() comes first"
        sizes = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self._process.pid:
                    rollup = (folder / "smaps_rollup").read_text()
                    sizes += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
            except (OSError, IndexError):
                continue  # it ended meanwhile
        return sizes

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _request(self, path: str, body: Any) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(self.url + path, data=json.dumps(body).encode(), headers=headers)

    def _failed(self, found: str) -> ServerFailedError:
        return ServerFailedError(
            where=" ".join(self.command),
            found=found,
            expected=f"a server that answers within {self._timeout:.0f} s",
            fix=f"read {self.log}",
            log_tail=self.log_tail(),
        )


@contextmanager
def named_failure(server: Server) -> Iterator[None]:
    """Turn a broken exchange with a server into an error that says what became of the server."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        deadline = time.monotonic() + DYING_SECONDS
        while server.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        code = server.exit_code()
        state = "that still runs" if code is None else f"that ended with code {code}"
        raise ServerFailedError(
            where=f"{server.log.stem} server",
            found=f"no answer ({type(error).__name__}: {error}) from a server {state}",
            expected="an answer to every request",
            fix=f"read {server.log}",
            log_tail=server.log_tail(),
        ) from error


def _group_lives(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()  # reap the leader, or its group never empties
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _parsed(body: bytes) -> Any:
    text = body.decode()
    try:
        return json.loads(text)
    except ValueError:
        return text
