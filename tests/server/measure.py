"""Measures the server for docs/performance.md:
    CALLA_SERVE_MAIN=build/tests/server/serve_main .venv/bin/python tests/server/measure.py turns|interrupt|batch|overhead MODEL
turns: time to the first token of 20 turns of a chat, without the cache, with it, and with reading ahead as well.
interrupt: time to the first token of a request that comes while another chat's next turn is read ahead, or would be.
batch: tokens a second of 1, 2, 4 and 8 streams at once.
overhead: the server's time for a token against `calla bench` (build/calla) in turns."""

import concurrent.futures
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

import conftest
import httpx
from conftest import Server

THREADS = 2


# Random weights write bytes that are no text; under a schema all of a reply is text.
PROSE = {"type": "json_schema", "json_schema": {"name": "prose", "schema": {"type": "string", "minLength": 400}}}


def stream(server, path, body):
    """The times of all events with text, from the request on, the last event with timings, and the text."""
    start, times, last, text = time.perf_counter(), [], None, ""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=600) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            choice = data["choices"][0]
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            if piece:
                times.append(time.perf_counter() - start)
                text += piece
            last = data if "timings" in data else last
    return times, last, text


def turns(n=20):
    """The replies are scripted, so that all three series answer the same prompts."""
    words = ["piano", "river", "castle", "violin", "lighthouse", "happy", "cold", "good"]
    shown = {}
    for name, options, more in (
        ("no cache", ("--prepare", 0), {"cache_prompt": False}),
        ("cache", ("--prepare", 0), {}),
        ("cache, read ahead", ("--prepare", 1), {}),
    ):
        server = Server("--context", 16384, "--threads", THREADS, *options)
        pick = random.Random(1)
        messages = [{"role": "system", "content": " ".join(pick.choices(words, k=500))}]
        rows = []
        for turn in range(n):
            messages.append({"role": "user", "content": " ".join(pick.choices(words, k=20))})
            body = {"messages": messages, "temperature": 0, "max_tokens": 40, "enable_thinking": False, **more}
            body["response_format"] = PROSE
            times, last, text = stream(server, "/v1/chat/completions", body)
            timings = last["timings"]
            prompt = timings["prompt_n"] + timings["cache_n"]
            rows.append((prompt, timings["prompt_n"], (times or [float("nan")])[0] * 1e3))
            messages.append({"role": "assistant", "content": text})
            time.sleep(0.1)
            busy = -1
            while busy != (busy := server.metric("prepared_tokens_total")):  # the user reads
                time.sleep(0.3)
        shown[name] = rows
        server.stop()
    print("turn | " + " | ".join(f"{name}: prompt, read, first token" for name in shown))
    for turn in (0, 1, 4, 9, 14, 19):
        print(turn + 1, *(f"{rows[turn][0]}, {rows[turn][1]}, {rows[turn][2]:.0f} ms" for rows in shown.values()), sep=" | ")
    for name, rows in shown.items():
        print(f"{name}: median of turns 2 to {n}: {statistics.median(row[2] for row in rows[1:]):.0f} ms")


def interrupt(rounds=4):
    servers = {name: Server("--context", 4096, "--threads", THREADS, "--prepare", name) for name in (0, 1)}
    seen = {name: [] for name in servers}
    pick = random.Random(2)
    for round in range(rounds):
        delay = pick.uniform(0, 0.4)
        for name, server in servers.items():
            messages = [{"role": "user", "content": f"{round} piano"}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 100, "enable_thinking": False}
            body["response_format"] = PROSE
            assert stream(server, "/v1/chat/completions", body)[1]
            time.sleep(delay)
            short = {"prompt": f"{round} is a number", "max_tokens": 2, "temperature": 0}
            start = time.perf_counter()
            server.post("/v1/completions", short)
            seen[name].append((time.perf_counter() - start) * 1e3)
            time.sleep(0.5)
    for name, server in servers.items():
        times = sorted(seen[name])
        print(
            f"{'reading ahead' if name else 'not reading ahead'}: a request of 2 tokens takes {statistics.median(times):.0f} ms, "
            f"90 %: {times[len(times) * 9 // 10]:.0f} ms; interrupted {server.metric('preparations_interrupted_total'):.0f} times, "
            f"{server.metric('prepared_tokens_total'):.0f} tokens read ahead"
        )
        server.stop()


def batch():
    server = Server("--context", 2048, "--threads", THREADS, "--max-sequences", 8)
    rates = {}
    for _ in range(3):
        for n in (1, 2, 4, 8):
            body = {"max_tokens": 60, "temperature": 0, "cache_prompt": False}
            with concurrent.futures.ThreadPoolExecutor(n) as pool:
                before, start = server.metric("generated_tokens_total"), time.perf_counter()
                list(pool.map(lambda i: server.post("/v1/completions", {**body, "prompt": f"Story {i}: once upon"}), range(n)))
                seconds = time.perf_counter() - start
            rates.setdefault(n, []).append((server.metric("generated_tokens_total") - before) / seconds)
    one = statistics.median(rates[1])
    for n, seen in rates.items():
        print(f"{n} at once: {statistics.median(seen):.0f} tokens/s, {statistics.median(seen) / one:.2f} of one")
    server.stop()


def overhead():
    rounds = 5
    server = Server("--context", 2048, "--threads", THREADS)
    bare, engine, rest = [], [], []
    for _ in range(rounds):
        out = subprocess.run(
            ["build/calla", "bench", "-m", str(conftest.MODEL), "-q", "--json", "--threads", str(THREADS), "-r", "1",
             "--prompts", "16", "--contexts", "16", "--decode-tokens", "256"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        bench = json.loads(out)
        bare.append(1e3 / bench["decode"][0]["tokens_per_s"])
        body = {"prompt": "What is this", "max_tokens": 257, "temperature": 0, "cache_prompt": False}
        start = time.perf_counter()
        timings = stream(server, "/v1/completions", body)[1]["timings"]
        rest.append((time.perf_counter() - start) * 1e3 - timings["prompt_ms"] - timings["predicted_ms"])
        engine.append(timings["predicted_per_token_ms"])
    print(f"outside the engine's clock: {statistics.median(rest):.1f} ms a request of {timings['predicted_n']} tokens")
    for name, seen in (("calla bench", bare), ("server", engine)):
        print(f"{name}: {statistics.median(seen):.3f} ms a token ({min(seen):.3f} to {max(seen):.3f})")
    server.stop()


if __name__ == "__main__":
    conftest.MODEL = pathlib.Path(sys.argv[2])
    {"turns": turns, "interrupt": interrupt, "batch": batch, "overhead": overhead}[sys.argv[1]]()
