"""Long conversations on the prefix cache: what is new is all that is computed, and a hit answers like a cold run.
CALLA_SEQUENCES sets how many random conversations are tried (20 by default)."""

import contextlib
import json
import os
import random
import threading
import time

import httpx
import pytest
from conftest import WEATHER, Server

CITIES = ["Paris", "Oslo", "Rome", "Cairo", "Lima", "Tokyo", "Bern", "Quito"]


def ask(server, messages, **more):
    answer = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 100, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def as_sent_back(message):
    """The reply as a client sends it that parses arguments and prints them in its own way."""
    reply = {"role": "assistant", "content": message["content"]}
    reply["reasoning_content"] = message.get("reasoning_content", "")
    if message.get("tool_calls"):
        reply["tool_calls"] = json.loads(json.dumps(message["tool_calls"]))
        for call in reply["tool_calls"]:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return reply


def without_ids(message):
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message | {"tool_calls": calls}


def next_messages(message, turn):
    """What an agent sends after this reply."""
    if message.get("tool_calls"):
        result = '{"temperature": 7, "condition": "rainy"}'
        return [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in message["tool_calls"]]
    return [{"role": "user", "content": f"What is the weather in {CITIES[turn % len(CITIES)]}?"}]


def twenty_turns(server, restart_after=None):
    """`restart_after` (turn -> server) takes the place of the server after some turns."""
    more = {"tools": [WEATHER], "preserve_thinking": True}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    known = 0
    calls = 0
    for turn in range(20):
        answer = ask(server, messages, **more)
        usage, message = answer["usage"], answer["choices"][0]["message"]
        if turn > 0:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 8, turn
            assert answer["timings"]["prompt_n"] <= usage["prompt_tokens"] - known + 8
        if turn % 5 == 4:
            cold = ask(server, messages, **more, cache_prompt=False)["choices"][0]["message"]
            assert without_ids(cold) == without_ids(message)
        known = usage["prompt_tokens"] + usage["completion_tokens"]
        calls += len(message.get("tool_calls") or [])
        messages += [as_sent_back(message), *next_messages(message, turn)]
        if restart_after:
            server = restart_after(turn, server)
    assert calls >= 5


def test_twenty_turns_prefill_only_what_is_new(server):
    twenty_turns(server)


def test_twenty_turns_with_kills(tmp_path, make_server):
    options = ("--cache-dir", tmp_path, "--context", 4096)

    def restart_after(turn, server):
        if turn % 4 != 2:
            return server
        time.sleep(0.3)  # what a kill may lose is what is being written at that moment
        server.kill()
        return make_server(*options)

    twenty_turns(make_server(*options), restart_after)


def test_kills_in_the_middle_of_everything(tmp_path, make_server):
    """kill -9 while replies run and snapshots are written: what is left never changes an answer."""
    question = {"messages": [{"role": "user", "content": "What is a lighthouse?"}], "temperature": 0}
    expected = None
    for round in range(6):
        server = make_server("--cache-dir", tmp_path, "--context", 2048)
        answer = server.post("/v1/chat/completions", question).json()["choices"][0]["message"]
        expected = expected or answer
        assert answer == expected
        assert not [line for line in server.log if "damaged" in line], server.log
        body = {"messages": [{"role": "user", "content": f"{round} " + "and a long text " * 100}]}

        def ask_until_killed():
            with contextlib.suppress(httpx.HTTPError):
                server.post("/v1/chat/completions", body)

        workers = [threading.Thread(target=ask_until_killed) for _ in range(4)]
        for worker in workers:
            worker.start()
        time.sleep(0.05 + 0.05 * round)
        server.kill()
        for worker in workers:
            worker.join()


def test_the_cache_survives_kill_and_restart(tmp_path, make_server):
    more = {"enable_thinking": False}
    messages = [
        {"role": "system", "content": "You are a helpful assistant." + " Be kind." * 100},
        {"role": "user", "content": "What is a piano?"},
    ]
    first = make_server("--cache-dir", tmp_path, "--context", 2048)
    answer = ask(first, messages, **more)
    messages += [as_sent_back(answer["choices"][0]["message"]), {"role": "user", "content": "And what is a violin?"}]
    expected = ask(first, messages, **more)
    first.kill()
    second = make_server("--cache-dir", tmp_path, "--context", 2048)
    again = ask(second, messages, **more)
    assert again["choices"][0]["message"] == expected["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"] - 8


class Conversation:
    """Random turns, edits, cancelled replies and regenerated ones; each answer must be that of a cold run."""

    QUESTIONS = ["What is a {}?", "Define {}.", "What is the opposite of {}?", "Repeat: {} {}", "Name a {}."]
    WORDS = ["piano", "violin", "happy", "cold", "river", "castle", "good", "lighthouse"]

    def __init__(self, server, seed):
        self.server = server
        self.random = random.Random(seed)
        self.messages = []
        self.more = {"enable_thinking": self.random.random() < 0.5, "max_tokens": 24}
        if self.random.random() < 0.5:
            self.messages.append(
                {"role": "system", "content": self.random.choice(["Be brief.", "Answer in upper case."])}
            )
        if self.random.random() < 0.3:
            self.more["preserve_thinking"] = True

    def question(self):
        word = self.random.choice(self.WORDS)
        return {"role": "user", "content": self.random.choice(self.QUESTIONS).format(word, word)}

    def cancel_one(self):
        body = {"messages": self.messages, "temperature": 0, "stream": True, **self.more}
        with httpx.stream("POST", self.server.url + "/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(self.random.randint(0, 12)):
                next(lines, None)

    def step(self):
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if users and self.random.random() < 0.3:  # edit an earlier question; what follows it is gone
            del self.messages[self.random.choice(users) :]
        self.messages.append(self.question())
        if self.random.random() < 0.4:
            self.cancel_one()
        warm = ask(self.server, self.messages, **self.more)
        cold = ask(self.server, self.messages, cache_prompt=False, **self.more)
        assert warm["choices"][0]["message"] == cold["choices"][0]["message"], self.messages
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        reply = as_sent_back(warm["choices"][0]["message"])
        if self.random.random() < 0.3:
            del reply["reasoning_content"]
        self.messages.append(reply)
        return warm["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("snapshots", [-1, 6])
def test_random_conversations_answer_like_cold_runs(snapshots):
    server = Server("--context", 2048, "--cache-snapshots", snapshots)
    cached = 0
    try:
        for seed in range(int(os.environ.get("CALLA_SEQUENCES", "20")) // 2):
            conversation = Conversation(server, seed * 2 + (snapshots > 0))
            cached += sum(conversation.step() for _ in range(conversation.random.randint(2, 5)))
        assert cached > 0
        assert server.stop() == 0
    finally:
        server.kill()
