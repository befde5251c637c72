"""A live server with calla-tiny, for the suite that drives it through the official SDKs and through raw HTTP."""

import json
import os
import pathlib
import signal
import subprocess
import threading

import httpx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "calla-tiny"
GOLDEN = json.loads((MODEL / "golden.json").read_text())["chats"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}


class Server:
    """A process of the server; its log is kept for assertions."""

    def __init__(self, *options):
        command = [os.environ["CALLA_SERVE_MAIN"], str(MODEL), "--threads", "1", *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log = []
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(self.process.stderr.read())
        self.port = int(self.url.rsplit(":", 1)[1])
        self.reader = threading.Thread(target=self._read_log, daemon=True)
        self.reader.start()

    def _read_log(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))

    def stop(self, timeout=20):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout)
        self.reader.join(5)
        return code

    def kill(self):
        self.process.kill()
        self.process.wait()

    def post(self, path, body, **more):
        return httpx.post(self.url + path, json=body, timeout=120, **more)

    def chat(self, content, **more):
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **more}
        answer = self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name):
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith("calla_" + name + " "):
                return float(line.split()[1])
        raise KeyError(name)


@pytest.fixture
def make_server():
    """Starts servers with special options; each ends with its test."""
    servers = []

    def make(*options):
        servers.append(Server(*options))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def server():
    running = Server("--context", 4096)
    yield running
    assert running.process.poll() is None, "the server has died"
    assert running.stop() == 0
    assert not [line for line in running.log if "internal error" in line]


@pytest.fixture(scope="session")
def openai_client(server):
    import openai

    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def anthropic_client(server):
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)
