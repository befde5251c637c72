"""Every field of every endpoint with values that nobody should send: each gets an answer or a refusal in the API's form,
never a failure, and the server stays as it was."""

import json

import httpx
import pytest

VALUES = [
    "null", "true", "0", "-1", "1", "1.5", "-1e308", "1e999", "-1e999", "NaN", "Infinity", "-0.0", "1e-320",
    "18446744073709551615", "18446744073709551616", "-9223372036854775808", "-9223372036854775809", "1" + "0" * 400,
    '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', "[]", "{}", "[null]", "[[]]", "[1, 2]", '[""]', '{"a": {"b": []}}',
    '[{"type": "x"}]', '"' + "a" * 50000 + '"', "[" + ", ".join(['"s"'] * 20) + "]",
]  # fmt: skip

ASK = [{"role": "user", "content": "Hi"}]
SAMPLING = ["temperature", "top_p", "top_k", "stream"]
FIELDS = {
    "/v1/chat/completions": (
        {"messages": ASK, "max_tokens": 2},
        SAMPLING
        + "min_p n max_completion_tokens stop stream_options seed logprobs top_logprobs presence_penalty".split()
        + "frequency_penalty repetition_penalty tools tool_choice parallel_tool_calls response_format".split()
        + "chat_template_kwargs enable_thinking reasoning_effort preserve_thinking cache_prompt return_progress".split()
        + "logit_bias functions modalities audio user metadata store model".split(),
    ),
    "/v1/completions": ({"prompt": "Hi", "max_tokens": 2}, SAMPLING + "n best_of echo suffix logprobs stop seed".split()),
    "/v1/responses": (
        {"input": "Hi", "max_output_tokens": 2},
        SAMPLING + "instructions tools tool_choice text reasoning previous_response_id include truncation".split(),
    ),
    "/v1/messages": (
        {"messages": ASK, "max_tokens": 2},
        SAMPLING + "system tools tool_choice thinking stop_sequences metadata output_config".split(),
    ),
    "/v1/messages/count_tokens": ({"messages": ASK}, ["system", "tools", "thinking"]),
    "/tokenize": ({"content": "x"}, ["parse_special"]),
    "/detokenize": ({"tokens": [1]}, []),
}


@pytest.mark.parametrize("path", FIELDS)
def test_any_value_in_any_field(server, path):
    base, fields = FIELDS[path]
    refused = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for field in [*base, *fields]:
            rest = json.dumps({name: value for name, value in base.items() if name != field})
            for value in VALUES:
                text = rest[:-1] + (", " if len(rest) > 2 else "") + f'"{field}": {value}}}'
                answer = client.post(path, content=text)
                assert answer.status_code in (200, 400), (field, value[:50], answer.text)
                if answer.headers["content-type"] == "text/event-stream":
                    assert answer.text.startswith((": ", "data: ", "event: "))
                elif answer.status_code == 400:
                    assert answer.json()["error"]["message"]
                    refused += 1
    assert refused >= 20


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00", b"\xf4\x90\x80\x80"], ids=bytes.hex
)
def test_bytes_that_are_no_utf8(server, raw):
    for body in (
        b'{"max_tokens": 2, "messages": [{"role": "user", "content": "a' + raw + b'b"}]}',
        b'{"max_tokens": 2, "mo' + raw + b'del": "x", "messages": [{"role": "' + raw + b'", "content": "ab"}]}',
    ):
        answer = httpx.post(server.url + "/v1/chat/completions", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("content", ["\ud800", "a\udfffb", "\x00", "\uffff\ufffe", "\u202e\u2066", "e\u0301" * 3000])
def test_odd_unicode_in_messages(server, content):
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        content=json.dumps({"max_tokens": 2, "messages": [{"role": "user", "content": content}]}),
        timeout=60,
    )
    assert answer.status_code in (200, 400), answer.text
    answer.json()


SCHEMAS = [
    '{"$ref": "#"}',
    '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"type": "string", "pattern": "(a+)+$"}',
    '{"type": "string", "pattern": "a{1,100000}"}',
    '{"type": "string", "pattern": "((((a{50}){50}){50}){50})"}',
    '{"type": "string", "minLength": 1000000000}',
    '{"type": "array", "minItems": 1000000000, "items": {}}',
    '{"enum": []}',
    '{"type": "integer", "minimum": 1e308}',
    '{"type": "integer", "multipleOf": 0}',
    '{"anyOf": [' + ", ".join(['{"type": "string"}'] * 5000) + "]}",
    "5",
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema[:40])
def test_hostile_schemas(server, schema):
    body = '{"max_tokens": 2, "enable_thinking": false, "messages": [{"role": "user", "content": "x"}], '
    body += '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}}' % schema
    answer = httpx.post(server.url + "/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text


def test_a_prompt_of_many_megabytes_hurts_nobody(server):
    body = json.dumps({"messages": [{"role": "user", "content": "a" * (8 << 20)}]})
    answer = httpx.post(server.url + "/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    many = json.dumps({"messages": ASK * 10_001})
    assert "10000 messages" in httpx.post(server.url + "/v1/chat/completions", content=many, timeout=60).text
    assert server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1}).status_code == 200
