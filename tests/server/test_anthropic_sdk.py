"""The official Anthropic SDK against /v1/messages."""

import json

import anthropic
import pytest
from conftest import GOLDEN, WEATHER

TOOL = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}

# Newer versions of the SDK have no argument for it.
GREEDY = {"temperature": 0}


def create(client, content, **more):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    more = {"max_tokens": 300, **more}
    return client.messages.create(model="calla-tiny", messages=messages, extra_body=GREEDY, **more)


def expected(chat):
    reasoning, _, content = chat["output_text"].removesuffix("<|im_end|>").rpartition("\n</think>\n\n")
    return reasoning, content


def test_text_and_thinking(anthropic_client):
    answer = create(anthropic_client, "What is a lighthouse?")
    reasoning, content = expected(GOLDEN[1])
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == reasoning and answer.content[1].text == content
    assert answer.stop_reason == "end_turn" and answer.role == "assistant"
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == GOLDEN[1]["prompt_tokens"]
    assert usage.output_tokens == GOLDEN[1]["output_tokens"]
    plain = create(anthropic_client, "What is a kangaroo?", thinking={"type": "disabled"})
    assert [block.type for block in plain.content] == ["text"]
    assert plain.content[0].text == expected(GOLDEN[0])[1]


def test_stream(anthropic_client):
    with anthropic_client.messages.stream(
        model="m", max_tokens=300, extra_body=GREEDY, messages=[{"role": "user", "content": "What is a lighthouse?"}]
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    reasoning, content = expected(GOLDEN[1])
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == reasoning and message.content[1].text == content
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == GOLDEN[1]["output_tokens"]
    assert events[0] == "message_start" and events[-1] == "message_stop"


def test_tool_round_trip(anthropic_client):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = create(anthropic_client, messages, tools=[TOOL])
    call = first.content[-1]
    assert call.type == "tool_use" and call.name == "get_weather" and call.input == {"city": "Oslo"}
    assert first.stop_reason == "tool_use"
    with anthropic_client.messages.stream(
        model="m", max_tokens=300, extra_body=GREEDY, messages=messages, tools=[TOOL]
    ) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[-1].input == {"city": "Oslo"} and streamed.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    result = [{"type": "text", "text": '{"temperature": -3, "condition": "snowy"}'}]
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]})
    second = create(anthropic_client, messages, tools=[TOOL], thinking={"type": "disabled"})
    assert second.content[0].text == "It is -3 degrees and snowy in Oslo."


def test_system_and_stop_sequence(anthropic_client):
    answer = create(
        anthropic_client,
        "What is your name?",
        system=[{"type": "text", "text": "Answer in upper case."}],
        thinking={"type": "disabled"},
    )
    assert answer.content[0].text == "MY NAME IS CALLA TINY."
    stopped = create(anthropic_client, "What is a kangaroo?", stop_sequences=["any"], thinking={"type": "disabled"})
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "any"
    assert stopped.content[0].text == "A kangaroo is "


def test_max_tokens(anthropic_client):
    answer = create(anthropic_client, "What is a kangaroo?", max_tokens=3, thinking={"type": "disabled"})
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 3


def test_count_tokens(anthropic_client):
    count = anthropic_client.messages.count_tokens(
        model="m", messages=[{"role": "user", "content": "What is a lighthouse?"}]
    )
    assert count.input_tokens == GOLDEN[1]["prompt_tokens"]


def test_errors_have_their_own_form(anthropic_client, server):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(anthropic_client, [{"role": "user", "content": [image]}])
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0]" in caught.value.body["error"]["message"]
    answer = server.post("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]
    long = server.post("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "word " * 5000}]})
    assert long.status_code == 400 and "4096" in long.json()["error"]["message"]
