"""Raw HTTP: safety, limits, clients that leave, and shutting down."""

import concurrent.futures
import json
import signal
import socket
import time

import httpx
import pytest

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
LONG = {"prompt": "Once upon a time", "max_tokens": 3000, "temperature": 1, "seed": 1}


def raw(server, data, timeout=20):
    """Sends bytes, and returns all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout) as client:
        client.sendall(data)
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
        return answer


def status(answer):
    return int(answer.split(b" ", 2)[1])


def wait_until(condition, seconds=15):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_health_and_metrics(server):
    health = httpx.get(server.url + "/health")
    assert health.status_code == 200 and health.json()["status"] == "ok"
    before = server.metric("requests_total")
    server.post("/v1/chat/completions", HELLO)
    assert server.metric("requests_total") == before + 1
    text = httpx.get(server.url + "/metrics").text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0


def test_tokenize_round_trip(server):
    text = "Hello <|im_end|> wörld 👩\u200d💻"
    tokens = server.post("/tokenize", {"content": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == text
    plain = server.post("/tokenize", {"content": text, "parse_special": False}).json()["tokens"]
    assert len(plain) > len(tokens)
    assert server.post("/detokenize", {"tokens": plain}).json()["content"] == text
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_unknown_paths_and_methods(server):
    for path in ("/nothing", "/v1/chat", "/v1/models/../../etc/passwd", "/%2e%2e/"):
        assert httpx.get(server.url + path).status_code == 404
    answer = httpx.get(server.url + "/v1/chat/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert httpx.post(server.url + "/health").status_code == 405
    head = httpx.head(server.url + "/health")
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'{"messages": [}', b"\xff\xfe", b'{"messages": "\xff"}', b"[" * 100000]
)
def test_bodies_that_are_no_request(server, body):
    answer = httpx.post(server.url + "/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "request_bytes, code",
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 40000, 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", 413),
    ],
)
def test_malformed_http(server, request_bytes, code):
    answer = raw(server, request_bytes)
    assert status(answer) == code, answer
    assert "error" in json.loads(answer.split(b"\r\n\r\n", 1)[1])


def test_chunked_and_expect(server):
    body = b'{"content": "Hello"}'
    chunks = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in body) + b"0\r\n\r\n"
    answer = raw(server, b"POST /tokenize HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert status(answer) == 200
    head = b"POST /tokenize HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    answer = raw(server, head + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_pipelined_requests(server):
    one = b"GET /health HTTP/1.1\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert raw(server, one * 3 + last).count(b"HTTP/1.1 200 OK") == 4


def test_odd_targets(server):
    for target in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/chat%2fcompletions", "//v1//models", "/health#x"):
        assert status(raw(server, f"GET {target} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())) == 404, target


def test_half_closed_and_cut_requests(server):
    body = json.dumps(HELLO).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    for data in (head % len(body) + body[:-5], head[:40], b""):
        with socket.create_connection(("127.0.0.1", server.port), 20) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := client.recv(65536):
                answer += chunk
        assert not answer or status(answer) == 408
    assert server.post("/v1/chat/completions", HELLO).status_code == 200


def test_cors_is_off(server):
    mine = {"Origin": server.url}
    assert httpx.get(server.url + "/v1/models", headers=mine).status_code == 200
    other = httpx.get(server.url + "/v1/models", headers={"Origin": "https://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        content=json.dumps(HELLO),
        headers={"Origin": "null", "Content-Type": "text/plain"},
    )
    assert answer.status_code == 403


def test_cors_for_a_listed_page(make_server):
    server = make_server("--cors-origin", "https://app.example")
    headers = {"Origin": "https://app.example"}
    asked = httpx.options(
        server.url + "/v1/chat/completions", headers={**headers, "Access-Control-Request-Method": "POST"}
    )
    assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert (
        httpx.get(server.url + "/v1/models", headers=headers).headers["access-control-allow-origin"]
        == "https://app.example"
    )
    assert httpx.get(server.url + "/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403


def test_host_names_are_checked(server):
    for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
        assert httpx.get(server.url + "/v1/models", headers={"Host": host}).status_code == 403
    for host in ("localhost", "localhost:1234", "127.0.0.1", "[::1]:80"):
        assert httpx.get(server.url + "/v1/models", headers={"Host": host}).status_code == 200


def test_api_key(make_server):
    server = make_server("--api-key", "secret-key")
    get = lambda **headers: httpx.get(server.url + "/v1/models", headers=headers)
    assert get().status_code == 401
    assert get(Authorization="Bearer wrong").status_code == 401
    assert get(Authorization="Bearer secret-ke").status_code == 401
    assert get(Authorization="Bearer secret-keyy").status_code == 401
    assert get(Authorization="Bearer secret-key").status_code == 200
    assert get(**{"x-api-key": "secret-key"}).status_code == 200
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/").status_code == 200
    assert httpx.get(server.url + "/metrics").status_code == 401
    wrong = httpx.post(server.url + "/v1/messages", json=HELLO)
    assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error"


def test_public_address_needs_a_key(make_server):
    with pytest.raises(RuntimeError, match="--api-key"):
        make_server("--host", "0.0.0.0")
    make_server("--host", "0.0.0.0", "--api-key", "k")


def test_port_in_use(server, make_server):
    with pytest.raises(RuntimeError, match="--port"):
        make_server("--port", server.port)


def test_page_is_self_contained(server):
    page = httpx.get(server.url + "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for mark in ('src="http', 'href="http', "@import", "url("):
        assert mark not in page.text


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_stops_the_work(server, stream):
    before = server.metric("http_disconnects_total")
    body = json.dumps({**LONG, "stream": stream}).encode()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert wait_until(lambda: server.metric("running") >= 1)
    client.close()
    assert wait_until(lambda: server.metric("running") == 0, 5)
    assert server.metric("http_disconnects_total") == before + 1
    assert server.chat("What is a kangaroo?", enable_thinking=False)["choices"][0]["message"]["content"].startswith(
        "A kangaroo is"
    )


def test_slow_clients_do_not_hurt_others(make_server):
    server = make_server("--head-timeout-ms", 1500)
    slow = []
    for _ in range(40):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX: ")
        slow.append(client)
    start = time.time()
    assert server.post("/v1/chat/completions", HELLO).status_code == 200
    assert time.time() - start < 5
    end = time.time() + 6
    closed = 0
    for client in slow:  # a byte now and then does not help
        client.settimeout(max(0.1, end - time.time()))
        try:
            client.sendall(b"a")
            closed += client.recv(4096).startswith(b"HTTP/1.1 408")
        except OSError:
            closed += 1
    assert closed == len(slow)


def test_too_many_connections(make_server):
    server = make_server("--max-connections", 4)
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    time.sleep(0.3)
    answer = raw(server, b"GET /health HTTP/1.1\r\n\r\n")
    assert status(answer) == 503 and b"Retry-After" in answer
    for client in held:
        client.close()
    assert wait_until(lambda: status(raw(server, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")) == 200)


def test_large_bodies_are_refused(make_server):
    server = make_server("--max-body", 100_000)
    big = httpx.post(server.url + "/tokenize", json={"content": "x" * 200_000})
    assert big.status_code == 413
    assert server.post("/tokenize", {"content": "x" * 50_000}).status_code == 200


def test_full_queue(make_server):
    server = make_server("--max-sequences", 1, "--max-queue", 1)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 150}) for _ in range(6)]
        answers = [job.result() for job in jobs]
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200 and codes[-1] == 503 and set(codes) == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "queue_full"
    assert server.post("/v1/chat/completions", HELLO).status_code == 200


def test_log_holds_no_text(make_server):
    server = make_server()
    server.chat("my-secret-question", max_tokens=2)
    server.post("/v1/chat/completions", {"messages": [{"role": "robot", "content": "my-secret-question"}]})
    assert wait_until(lambda: any("prompt" in line for line in server.log))
    assert server.stop() == 0
    assert not [line for line in server.log if "secret" in line]


def test_graceful_shutdown(make_server):
    server = make_server()
    body = {**LONG, "max_tokens": 200, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"length"' in rest[-4]
    assert server.process.wait(10) == 0


def test_graceful_shutdown_under_load(make_server):
    server = make_server("--max-queue", 64)
    body = {**LONG, "stream": True, "max_tokens": 200}

    def client(_):
        try:
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
                lines = [line for line in response.iter_lines() if line]
        except httpx.TransportError:  # it came too late to be let in
            return None
        if response.status_code == 503:
            return None
        assert lines[-1] == "data: [DONE]" or "shutting down" in lines[-1], lines[-1]
        return lines[-1]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(client, i) for i in range(16)]
        assert wait_until(lambda: server.metric("running") == 8)
        assert server.stop(timeout=30) == 0
        ends = [job.result() for job in jobs]
    assert [end for end in ends if end]
    assert not [line for line in server.log if "internal" in line]


def test_replies_that_take_too_long_are_told(make_server):
    server = make_server("--grace-ms", 200)
    body = {**LONG, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-1]
    assert server.process.wait(20) == 0


def test_second_signal_stops_at_once(make_server):
    server = make_server()
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)
    assert "shutting down" in rest
    assert server.process.wait(5) == 0
