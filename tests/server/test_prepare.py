"""Reading the next turn ahead while the server has nothing else to do."""

import time

import pytest
from conftest import WEATHER, Server
from test_conversations import ask, as_sent_back


def settled(server, metric, value):
    """Waits until the counter has reached the value."""
    deadline = time.time() + 20
    while server.metric(metric) < value:
        assert time.time() < deadline, (metric, server.metric(metric))
        time.sleep(0.02)


def tokens_of(server, text):
    return len(server.post("/tokenize", {"content": text}).json()["tokens"])


@pytest.fixture
def preparing(make_server):
    return make_server("--context", 2048)


@pytest.mark.parametrize("more", [{}, {"enable_thinking": False}], ids=["thinking", "plain"])
def test_the_next_turn_reads_only_the_new_message(preparing, more):
    messages = [{"role": "user", "content": "What is a lighthouse?"}]
    for turn in range(4):
        before = preparing.metric("preparations_total")
        answer = ask(preparing, messages, **more)
        cold = ask(preparing, messages, cache_prompt=False, **more)  # which is not followed by a preparation
        assert answer["choices"][0]["message"] == cold["choices"][0]["message"]
        if turn > 0:
            new = tokens_of(preparing, messages[-1]["content"])
            assert answer["timings"]["prompt_n"] <= new + 12, answer["timings"]
        settled(preparing, "preparations_total", before + 1)
        assert preparing.metric("preparations_total") == before + 1
        messages.append(as_sent_back(answer["choices"][0]["message"]))
        if turn % 2 == 0:
            del messages[-1]["reasoning_content"]  # many clients do not send it back
        messages.append({"role": "user", "content": f"And what is a {['violin', 'castle', 'river', 'piano'][turn]}?"})
    lines = [line for line in preparing.log if line.startswith("prepared a next turn: ")]
    assert len(lines) == 4
    assert preparing.metric("prepared_tokens_total") > 0


@pytest.mark.parametrize("dialect", ["responses", "messages", "stream"])
def test_other_dialects(preparing, dialect):
    question = [{"role": "user", "content": "What is a lighthouse?"}]
    if dialect == "responses":
        body = {"input": question, "temperature": 0, "max_output_tokens": 100}
        assert preparing.post("/v1/responses", body).status_code == 200
    elif dialect == "messages":
        body = {"messages": question, "temperature": 0, "max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        assert preparing.post("/v1/messages", body).status_code == 200
    else:
        body = {"messages": question, "temperature": 0, "stream": True}
        assert preparing.post("/v1/chat/completions", body).status_code == 200
    settled(preparing, "preparations_total", 1)


def test_after_a_tool_loop_its_reasoning_is_dropped(preparing):
    more = {"tools": [WEATHER]}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = ask(preparing, messages, **more)
    message = answer["choices"][0]["message"]
    assert message["tool_calls"]
    messages += [as_sent_back(message)]
    messages += [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"temperature": 7}'}]
    time.sleep(0.3)
    assert preparing.metric("preparations_total") == 0  # the state after a call is the next turn's already
    answer = ask(preparing, messages, **more)
    assert answer["timings"]["prompt_n"] < 40
    settled(preparing, "preparations_total", 1)
    messages += [as_sent_back(answer["choices"][0]["message"]), {"role": "user", "content": "Thanks."}]
    answer = ask(preparing, messages, **more)
    assert answer["timings"]["prompt_n"] <= tokens_of(preparing, "Thanks.") + 12
    cold = ask(preparing, messages, cache_prompt=False, **more)
    assert cold["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]


def test_off_switch(make_server):
    server = make_server("--prepare", 0)
    server.chat("What is a lighthouse?")
    time.sleep(0.5)
    assert server.metric("preparations_total") == 0
    assert not [line for line in server.log if "prepared" in line]
