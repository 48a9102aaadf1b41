"""Servers on loopback, on free ports, that tests start, kill, and slow down."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

HOST = "127.0.0.1"


def free_port():
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


class Server:
    """A process that listens on a port, which stays the same when it is started again."""

    def __init__(self, command, is_ready, **options):
        self.port, self._command, self._is_ready, self._options = free_port(), command, is_ready, options
        self.start()

    def start(self):
        self.process = subprocess.Popen(self._command(self.port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._options)
        end = time.monotonic() + 30
        while True:
            try:
                return self._is_ready(self.port)
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end, "the server has not started"
                time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def redis_server(folder, *options):
    """Debian's redis-server with nothing in it, which keeps nothing when it ends."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs redis-server")
    always = ("--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(folder))
    server = Server(
        lambda port: [program, "--port", str(port), *always, *options], lambda port: socket.create_connection((HOST, port)).close()
    )
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def s3_server(monkeypatch):
    """moto's server with a bucket named "prompts"; the environment points to it."""
    pytest.importorskip("moto.server", reason='needs pip install "kvfast[cloud-test]"')

    def is_ready(port):
        urllib.request.urlopen(f"http://{HOST}:{port}/moto-api/", timeout=5).close()

    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    server = Server(lambda port: [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], is_ready, env=environment)
    try:
        use_s3(monkeypatch, server.port)
        make_bucket(server.port)
        yield server
    finally:
        server.kill()


def use_s3(monkeypatch, port):
    for name, value in {
        "ACCESS_KEY_ID": "access",
        "SECRET_ACCESS_KEY": "hunter2",
        "REGION": "us-east-1",
        "ALLOW_HTTP": "true",
        "ENDPOINT_URL": f"http://{HOST}:{port}",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def make_bucket(port):
    request = urllib.request.Request(f"http://{HOST}:{port}/prompts", method="PUT", headers={"Authorization": "AWS access:none"})
    urllib.request.urlopen(request, timeout=10).close()


class Proxy:
    """A door to a server that can be made slow.

    Attributes
    ----------
    manner : str
        "plain"; "delayed": each answer comes `pause` seconds later; "dripping": it comes in drops of one byte; "half-open": no answer
        comes, and the connection stays; "cut": the connection ends in the middle of an answer; "lying": `lie` comes instead.
    """

    def __init__(self, port):
        self.manner, self.pause, self.lie, self._to, self._sockets = "plain", 0.3, b"", port, []
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                try:
                    server = socket.create_connection((HOST, self._to))
                except ConnectionRefusedError:
                    client.close()
                    continue
                self._sockets.append(server)
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source, target, is_answer):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    self._answer(target, data)
                else:
                    target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _answer(self, target, data):
        if self.manner == "delayed":
            time.sleep(self.pause)
        if self.manner == "dripping":
            for i in range(len(data)):
                target.sendall(data[i : i + 1])
                time.sleep(0.05)
        elif self.manner == "lying":
            target.sendall(self.lie)
        elif self.manner == "cut":
            target.sendall(data[: len(data) // 2])
            raise OSError("cut")
        elif self.manner != "half-open":
            target.sendall(data)
