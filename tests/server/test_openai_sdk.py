"""The official OpenAI SDK against the server: what a user of the SDK does, streamed and not."""

import json

import openai
import pytest
from conftest import GOLDEN, WEATHER

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(client, content, **more):
    more.setdefault("temperature", 0)
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return client.chat.completions.create(model="calla-tiny", messages=messages, **more)


def collect(stream):
    """A streamed answer, put together as clients do."""
    reply = {"content": "", "reasoning": "", "calls": [], "finish": None, "usage": None, "chunks": 0}
    for chunk in stream:
        reply["chunks"] += 1
        if chunk.usage:
            reply["usage"] = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            reply["content"] += delta.content or ""
            reply["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(reply["calls"]):
                    assert call.id and call.type == "function" and call.function.name
                    reply["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                reply["calls"][call.index]["arguments"] += call.function.arguments or ""
            if choice.finish_reason:
                assert reply["finish"] is None
                reply["finish"] = choice.finish_reason
    return reply


def expected(chat):
    text = chat["output_text"].removesuffix("<|im_end|>")
    reasoning, _, content = text.rpartition("\n</think>\n\n")
    return reasoning, content


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_golden_chats(openai_client, index):
    chat = GOLDEN[index]
    request = chat["request"]
    more = {"extra_body": {"enable_thinking": request["enable_thinking"]}}
    if request["tools"]:
        more["tools"] = request["tools"]
    answer = ask(openai_client, request["messages"], **more)
    streamed = collect(
        ask(openai_client, request["messages"], stream=True, stream_options={"include_usage": True}, **more)
    )
    message = answer.choices[0].message
    assert answer.usage.prompt_tokens == chat["prompt_tokens"]
    assert answer.usage.completion_tokens == chat["output_tokens"]
    assert streamed["usage"].prompt_tokens == chat["prompt_tokens"]
    assert streamed["usage"].completion_tokens == chat["output_tokens"]
    assert answer.usage.total_tokens == chat["prompt_tokens"] + chat["output_tokens"]

    reasoning, content = expected(chat)
    assert getattr(message, "reasoning_content", "") == reasoning or (
        not reasoning and not hasattr(message, "reasoning_content")
    )
    assert streamed["reasoning"] == reasoning
    if "<tool_call>" in content:
        assert message.content is None and streamed["content"] == ""
        assert len(message.tool_calls) == 1 and len(streamed["calls"]) == 1
        call = message.tool_calls[0].function
        assert f"<function={call.name}>" in content
        assert streamed["calls"][0]["name"] == call.name
        assert streamed["calls"][0]["arguments"] == call.arguments
        for key, value in json.loads(call.arguments).items():
            assert f"<parameter={key}>\n{value}\n</parameter>" in content
        assert answer.choices[0].finish_reason == streamed["finish"] == "tool_calls"
    else:
        assert message.content == streamed["content"] == content
        assert answer.choices[0].finish_reason == streamed["finish"] == "stop"


def test_tool_round_trip(openai_client):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = ask(openai_client, messages, tools=[WEATHER])
    call = first.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature": -3, "condition": "snowy"}'})
    second = ask(openai_client, messages, tools=[WEATHER], extra_body=NO_THINKING)
    assert second.choices[0].message.content == "It is -3 degrees and snowy in Oslo."
    assert second.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("thinking", [True, False])
def test_forced_calls(openai_client, choice, thinking):
    answer = ask(
        openai_client,
        "What is a kangaroo?",
        tools=[WEATHER],
        tool_choice=choice,
        max_tokens=200,
        parallel_tool_calls=False,
        extra_body={"enable_thinking": thinking},
    )
    assert answer.choices[0].finish_reason in ("tool_calls", "length")
    if answer.choices[0].finish_reason == "tool_calls":
        call = answer.choices[0].message.tool_calls[0].function
        assert call.name == "get_weather" and isinstance(json.loads(call.arguments)["city"], str)


def test_tool_choice_none(openai_client):
    answer = ask(openai_client, "What is the weather in Paris?", tools=[WEATHER], tool_choice="none")
    assert not answer.choices[0].message.tool_calls


def test_one_call_only(openai_client):
    answer = ask(openai_client, "What is the weather in Paris?", tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


def test_json_schema(openai_client):
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    for thinking in (False, True):
        more = {"extra_body": {"enable_thinking": thinking}, "response_format": form, "max_tokens": 300}
        answer = ask(openai_client, "What is 3 plus 4?", **more)
        streamed = collect(ask(openai_client, "What is 3 plus 4?", stream=True, **more))
        assert streamed["content"] == (answer.choices[0].message.content or "")
        if answer.choices[0].finish_reason == "stop":
            value = json.loads(answer.choices[0].message.content)
            assert set(value) == {"answer", "sure"} and type(value["answer"]) is int and type(value["sure"]) is bool
        if thinking:
            assert "{" not in answer.choices[0].message.reasoning_content


def test_json_object(openai_client):
    answer = ask(
        openai_client, "Say hello.", response_format={"type": "json_object"}, max_tokens=60, extra_body=NO_THINKING
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.startswith("{")


def test_schema_that_cannot_be_enforced(openai_client):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, "Hi", response_format=form)
    assert "not" in caught.value.message


def test_cut_schema_is_not_completed(openai_client):
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
    }
    answer = ask(openai_client, "Who are you?", response_format=form, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.content


def test_logprobs(openai_client):
    answer = ask(
        openai_client, "What is a kangaroo?", logprobs=True, top_logprobs=3, max_tokens=6, extra_body=NO_THINKING
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 6
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert bytes(token.bytes).decode() == token.token
    stream = ask(
        openai_client,
        "What is a kangaroo?",
        logprobs=True,
        top_logprobs=3,
        max_tokens=6,
        stream=True,
        extra_body=NO_THINKING,
    )
    streamed = [t for chunk in stream for c in chunk.choices if c.logprobs for t in c.logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in tokens]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in tokens], abs=1e-3)


def test_logprobs_are_those_of_the_content(openai_client):
    answer = ask(openai_client, "Who are you?", logprobs=True)
    content = answer.choices[0].message.content
    assert "".join(t.token for t in answer.choices[0].logprobs.content).strip() == content


def test_n(openai_client):
    same = ask(openai_client, "Who are you?", n=3, extra_body=NO_THINKING)
    assert [c.index for c in same.choices] == [0, 1, 2]
    assert len({c.message.content for c in same.choices}) == 1
    varied = ask(
        openai_client,
        "Name an animal.",
        n=8,
        temperature=2,
        seed=1,
        max_tokens=8,
        extra_body={**NO_THINKING, "top_k": 0, "top_p": 1},
    )
    assert len({c.message.content for c in varied.choices}) > 1
    stream = ask(openai_client, "Who are you?", n=3, stream=True, extra_body=NO_THINKING)
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in same.choices]


def test_seed(openai_client):
    def draw(**more):
        answer = ask(
            openai_client,
            "Name an animal.",
            temperature=1.5,
            max_tokens=12,
            extra_body={**NO_THINKING, "top_k": 0, "top_p": 1},
            **more,
        )
        return answer.choices[0].message.content, answer.model_extra["seed"]

    assert draw(seed=7) == draw(seed=7)
    (_, first), (_, second) = draw(), draw()
    assert first != second
    text, seed = draw()
    assert draw(seed=seed) == (text, seed)


def test_stop(openai_client):
    full = ask(openai_client, "What is a kangaroo?", extra_body=NO_THINKING).choices[0].message.content
    for stop in ("herbivorous", ["never", "mars", "sup"], "several her"):
        answer = ask(openai_client, "What is a kangaroo?", stop=stop, extra_body=NO_THINKING)
        streamed = collect(ask(openai_client, "What is a kangaroo?", stop=stop, stream=True, extra_body=NO_THINKING))
        stops = [stop] if isinstance(stop, str) else stop
        end = min(full.index(s) for s in stops if s in full)
        assert answer.choices[0].message.content == streamed["content"] == full[:end]
        assert answer.choices[0].finish_reason == streamed["finish"] == "stop"
    assert answer.usage.completion_tokens < 20


def test_stop_does_not_reach_into_reasoning(openai_client):
    answer = ask(openai_client, "What is a lighthouse?", stop=["lighthouse", "The"])
    assert "lighthouse" in answer.choices[0].message.reasoning_content
    assert answer.choices[0].message.content == "A "


def test_reasoning_is_accepted_back(openai_client):
    first = ask(openai_client, "What is a lighthouse?").choices[0].message
    messages = [
        {"role": "user", "content": "What is a lighthouse?"},
        {"role": "assistant", "content": first.content, "reasoning_content": first.reasoning_content},
        {"role": "user", "content": "And what is a violin?"},
    ]
    assert ask(openai_client, messages).choices[0].message.content


def test_usage_of_reasoning(openai_client):
    answer = ask(openai_client, "Who are you?")
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    assert (
        ask(openai_client, "Who are you?", extra_body=NO_THINKING).usage.completion_tokens_details.reasoning_tokens == 0
    )


def test_usage_only_when_asked(openai_client):
    assert collect(ask(openai_client, "Who are you?", stream=True))["usage"] is None


def test_max_tokens(openai_client):
    for more in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}):
        answer = ask(openai_client, "What is a kangaroo?", extra_body=NO_THINKING, **more)
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"


def test_timings(openai_client):
    timings = ask(openai_client, "What is a piano?").model_extra["timings"]
    assert timings["prompt_n"] + timings["cache_n"] > 0 and timings["predicted_n"] > 0
    assert timings["predicted_per_second"] == pytest.approx(timings["predicted_n"] / timings["predicted_ms"] * 1e3)
    chunks = list(ask(openai_client, "What is a piano?", stream=True))
    assert chunks[-1].model_extra["timings"]["predicted_n"] == timings["predicted_n"]


def test_models(openai_client):
    models = openai_client.models.list().data
    assert [m.id for m in models] == ["calla-tiny"]
    assert openai_client.models.retrieve("calla-tiny").id == "calla-tiny"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt-4")


def test_completions(openai_client):
    prompt = "<|im_start|>user\nWhat is a kangaroo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    expected_text = GOLDEN[0]["output_text"].removesuffix("<|im_end|>")
    create = lambda **more: openai_client.completions.create(
        model="m", temperature=0, **{"max_tokens": 100, "prompt": prompt, **more}
    )
    answer = create()
    assert answer.choices[0].text == expected_text and answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == GOLDEN[0]["prompt_tokens"]
    assert "".join(c.choices[0].text for c in create(stream=True)) == expected_text
    assert create(echo=True).choices[0].text == prompt + expected_text
    assert create(stop="kangaroo").choices[0].text == "A "
    several = create(prompt=[prompt, "Once"], n=2, max_tokens=5)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text and expected_text.startswith(several.choices[0].text)
    scored = create(logprobs=2, max_tokens=3).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == 3 and len(scored.top_logprobs[0]) == 2


def test_completions_from_tokens(openai_client, server):
    tokens = server.post("/tokenize", {"content": "Once upon a time"}).json()["tokens"]
    by_tokens = openai_client.completions.create(model="m", prompt=tokens, temperature=0, max_tokens=5)
    by_text = openai_client.completions.create(model="m", prompt="Once upon a time", temperature=0, max_tokens=5)
    assert by_tokens.choices[0].text == by_text.choices[0].text
    with pytest.raises(openai.BadRequestError):
        openai_client.completions.create(model="m", prompt=[4096])


@pytest.mark.parametrize(
    "more, field",
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"presence_penalty": "1.5"}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": 7}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"functions": []}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "S"}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_refusals(openai_client, more, field):
    body = {"messages": [{"role": "user", "content": "Hi"}], **more}
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error" and caught.value.message


def test_penalties_at_their_limits_are_accepted(openai_client):
    for value in (-2, 0, 1.5, 2):
        ask(openai_client, "Hi", presence_penalty=value, frequency_penalty=value, max_tokens=2)


def test_unknown_fields_are_ignored(openai_client):
    ask(openai_client, "Hi", max_tokens=1, user="me", extra_body={"made_up": [1, 2], "metadata": {"a": "b"}})


def test_responses(openai_client):
    create = lambda **more: openai_client.responses.create(model="m", temperature=0, **more)
    answer = create(input="What is a lighthouse?")
    reasoning, content = expected(GOLDEN[1])
    assert answer.output_text == content and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == reasoning
    assert answer.usage.input_tokens == GOLDEN[1]["prompt_tokens"]
    assert answer.usage.output_tokens == GOLDEN[1]["output_tokens"]
    assert create(input="What is a lighthouse?", reasoning={"effort": "none"}).output[0].type == "message"
    cut = create(input="What is a lighthouse?", max_output_tokens=5)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        create(input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_responses_stream(openai_client):
    with openai_client.responses.stream(model="m", input="What is a lighthouse?", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == expected(GOLDEN[1])[1]
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text


def test_responses_tools(openai_client):
    tool = {"type": "function", "strict": None, **WEATHER["function"]}
    create = lambda **more: openai_client.responses.create(model="m", temperature=0, tools=[tool], **more)
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    first = create(input=[question])
    call = [item for item in first.output if item.type == "function_call"][0]
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Oslo"}
    history = [question, *[item.model_dump(exclude_none=True) for item in first.output]]
    history.append(
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": -3, "condition": "snowy"}'}
    )
    second = create(input=history, reasoning={"effort": "none"})
    assert second.output_text == "It is -3 degrees and snowy in Oslo."
    with openai_client.responses.stream(model="m", input=[question], tools=[tool], temperature=0) as stream:
        deltas = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        assert json.loads(deltas) == {"city": "Oslo"}
        assert stream.get_final_response().output[-1].type == "function_call"
