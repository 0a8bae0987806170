"""`adaptivespec.launch` with a fake `sglang` package in place of the real one."""

import os
import signal
import socket
import textwrap
import time
import urllib.error

import pytest

from adaptivespec.errors import ConfigError
from adaptivespec.launch import Server, ServerFailedError, free_port

READY = """
    import http.server, json, subprocess, sys

    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    child.stdout.readline()
    print("child", child.pid, flush=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, code, body):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self):
            self.answer(200, "fine" if self.path == "/health_generate" else json.dumps({"argv": sys.argv[1:]}))

        def do_POST(self):
            if self.path == "/stream":
                return self.answer(200, 'data: {"n": 1}\\n\\ndata: {"n": 2}\\n\\ndata: [DONE]\\n\\n')
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(400 if body == "bad" else 200, json.dumps({"got": body, "type": self.headers["Content-Type"]}))

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A server whose `sglang.launch_server` is this source."""
    monkeypatch.setattr("adaptivespec.launch._GRACE_SECONDS", 0.5)

    def make(source: str, timeout: float = 60) -> Server:
        package = tmp_path / "sglang"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(textwrap.dedent(source))
        env = {"PYTHONPATH": str(tmp_path), "ADAPTIVESPEC_TEST": "yes"}
        return Server("the-model", ["--flag", "a b"], log=tmp_path / "logs" / "server.log", env=env, timeout=timeout)

    return make


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # an orphan may wait as a zombie for init
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_ready_server_answers_and_stops_with_its_children(make):
    server = make(READY)
    with server:
        assert server.exit_code() is None
        argv = server.get("/info")["argv"]
        assert argv == ["--model-path", "the-model", "--flag", "a b", "--host", "127.0.0.1", "--port", str(server.port)]
        assert server.get("/health_generate") == "fine"
        assert server.post("/x", {"a": [1]}) == {"got": {"a": [1]}, "type": "application/json"}
        assert list(server.stream("/stream", {})) == [{"n": 1}, {"n": 2}]
        assert server.resident_bytes() > 2**20
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.post("/x", "bad")
        child = int(server.log_tail().split("child ")[1].split()[0])
        assert is_alive(child)
    assert not is_alive(child)  # although it ignores SIGTERM
    assert server.exit_code() is None
    server.stop()  # twice is no error
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_a_server_that_dies_at_once_shows_its_last_words(make):
    server = make("""
        import os, sys
        print("\\n".join(f"line {i}" for i in range(100)))
        print("environment", os.environ["ADAPTIVESPEC_TEST"])
        sys.exit("adaptivespec: the cause")
    """)
    started = time.monotonic()
    with pytest.raises(ServerFailedError, match="found a server that ended with code 1") as caught, server:
        pytest.fail("it never was ready")
    assert time.monotonic() - started < 50  # long before the time is over
    lines = caught.value.log_tail.splitlines()
    assert lines[-1] == "adaptivespec: the cause"
    assert "environment yes" in lines
    assert len(lines) == 30
    assert f"fix: read {server.log}" in str(caught.value)
    assert "sglang.launch_server --model-path the-model" in str(caught.value)


def test_a_server_that_never_answers_is_given_up_and_stopped(make):
    server = make("import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)", timeout=3)
    with pytest.raises(ServerFailedError, match="found no answer within 3 s") as caught, server:
        pytest.fail("it never was ready")
    assert not is_alive(int(caught.value.log_tail.split()[1]))


def test_a_server_that_accepts_but_does_not_answer_is_given_up_in_time(make):
    server = make(
        """
        import socket, sys, time
        listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
        time.sleep(600)
        """,
        timeout=3,
    )
    started = time.monotonic()
    with pytest.raises(ServerFailedError, match="no answer within 3 s"), server:
        pytest.fail("it never was ready")
    assert time.monotonic() - started < 20


def test_a_server_that_dies_later_tells_its_exit_code(make):
    with make(READY) as server:
        os.kill(server._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while server.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.exit_code() == -signal.SIGKILL


def test_an_error_inside_the_block_stops_it_too(make):
    server = make(READY)
    with pytest.raises(urllib.error.HTTPError, match="400"), server:
        server.post("/x", "bad")
    assert not is_alive(int(server.log_tail().split("child ")[1].split()[0]))


def test_free_ports_are_free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize("word", ["--port", "--port=30000", "--host", "--model-path"])
def test_arguments_that_are_chosen_here_are_refused(word, tmp_path):
    with pytest.raises(ConfigError, match=word):
        Server("the-model", ["--dtype", "bfloat16", word, "1"], log=tmp_path / "server.log")
