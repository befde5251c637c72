"""Many clients at once: streams, cancels, bad requests, prompts that are too large. As a test it runs for some seconds;
    CALLA_SERVE_MAIN=... python tests/server/test_load.py SECONDS [CLIENTS]
runs it for longer and prints what it saw."""

import collections
import concurrent.futures
import json
import pathlib
import random
import sys
import time

import httpx
import pytest
from conftest import GOLDEN, Server

WORDS = ["kangaroo", "piano", "violin", "lighthouse", "river", "hammer", "castle", "rabbit"]


def question(word):
    return {
        "messages": [{"role": "user", "content": f"What is a {word}?"}],
        "temperature": 0,
        "max_tokens": 48,
        "enable_thinking": False,
    }


def rss_mib(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


class Client:
    def __init__(self, server, expected, seed):
        self.server = server
        self.expected = expected
        self.random = random.Random(seed)
        self.http = httpx.Client(base_url=server.url, timeout=300)
        self.seen = collections.Counter()
        self.first_token = []

    def run(self, end):
        actions = [self.whole, self.streamed, self.streamed, self.leave, self.bad, self.huge]
        while time.time() < end:
            self.random.choice(actions)()

    def check(self, word, text):
        assert text == self.expected[word], (word, text, self.expected[word])

    def whole(self):
        word = self.random.choice(WORDS)
        answer = self.http.post("/v1/chat/completions", json=question(word))
        if answer.status_code == 503:
            self.seen["full"] += 1
            return
        assert answer.status_code == 200, answer.text
        self.check(word, answer.json()["choices"][0]["message"]["content"])
        self.seen["whole"] += 1

    def stream(self, word, stop_after):
        text, n = "", 0
        start = time.time()
        with self.http.stream("POST", "/v1/chat/completions", json={**question(word), "stream": True}) as response:
            if response.status_code == 503:
                self.seen["full"] += 1
                return None
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if piece and not text:
                    self.first_token.append(time.time() - start)
                text += piece
                n += 1
                if n > stop_after:
                    return None
        return text

    def streamed(self):
        word = self.random.choice(WORDS)
        text = self.stream(word, 10_000)
        if text is not None:
            self.check(word, text)
            self.seen["streamed"] += 1

    def leave(self):
        self.stream(self.random.choice(WORDS), self.random.randint(0, 10))
        self.seen["left"] += 1

    def bad(self):
        body = self.random.choice([b"{", b"[1]", b'{"messages": 7}', b'{"messages": [{"role": "x"}]}'])
        assert self.http.post("/v1/chat/completions", content=body).status_code == 400
        self.seen["bad"] += 1

    def huge(self):
        body = {"messages": [{"role": "user", "content": "word " * 20_000}]}
        assert self.http.post("/v1/chat/completions", json=body).status_code == 400
        self.seen["huge"] += 1


def load(server, seconds, clients):
    expected = {}
    for word in WORDS:
        expected[word] = server.post("/v1/chat/completions", question(word)).json()["choices"][0]["message"]["content"]
    assert expected["kangaroo"] == GOLDEN[0]["output_text"].removesuffix("<|im_end|>")[: len(expected["kangaroo"])]
    workers = [Client(server, expected, seed) for seed in range(clients)]
    memory = [rss_mib(server)]
    most_running = 0
    end = time.time() + seconds
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        jobs = [pool.submit(worker.run, end) for worker in workers]
        while not all(job.done() for job in jobs):
            time.sleep(min(seconds / 10, 5))
            memory.append(rss_mib(server))
            most_running = max(most_running, int(server.metric("running")))
        for job in jobs:
            job.result()
    seen = sum((worker.seen for worker in workers), collections.Counter())
    first = sorted(t for worker in workers for t in worker.first_token)
    deadline = time.time() + 10
    while server.metric("running") > 0 and time.time() < deadline:
        time.sleep(0.1)
    return seen, memory, first, most_running


def test_many_clients():
    server = Server("--context", 2048, "--max-sequences", 8, "--max-queue", 64, "--cache-snapshots", 64)
    try:
        seen, memory, first, _ = load(server, 8, 32)
        assert all(seen[kind] > 0 for kind in ("whole", "streamed", "left", "bad", "huge")), seen
        assert server.metric("running") == 0 and server.metric("queued") == 0
        assert server.chat("Who are you?", enable_thinking=False)["choices"][0]["message"]["content"].startswith("I am")
        assert server.stop() == 0
    finally:
        server.kill()


if __name__ == "__main__":
    running = Server("--context", 2048, "--max-sequences", 8, "--max-queue", 64, "--cache-snapshots", 64)
    counts, rss, waits, most_running = load(running, float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32)
    print(dict(counts))
    print("RSS in MiB over time:", *(f"{value:.0f}" for value in rss))
    print(
        f"first token after: median {waits[len(waits) // 2]:.2f} s, 95 % {waits[len(waits) * 95 // 100]:.2f} s, worst {waits[-1]:.2f} s"
    )
    tokens, seconds = running.metric("generated_tokens_total"), float(sys.argv[1])
    print(f"{tokens:.0f} tokens written, {tokens / seconds:.0f}/s; most running at once: {most_running}")
    print("exit code", running.stop())
    print("sanitizers and failures:", [line for line in running.log if "anitizer" in line or " error" in line])
