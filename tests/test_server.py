"""The HTTP endpoint: with an engine that does what it's told, then with the real one."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import httpx2
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from specmeta import cli, models
from specmeta.generate import generate
from specmeta.serving import completions, server
from specmeta.serving.engine import Engine, Stats
from specmeta.serving.engine_thread import EngineThread
from specmeta.serving.request import Request, RequestError, SamplingParams
from specmeta.serving.server import make_server

# Longer than any test.
ENDLESS = 10**6
# For an answer, a thread or a process that comes at once.
WAIT = 20
# For a whole test.
TEST_SECONDS = 120


class FakeEngine:
    """Repeats the prompt, a letter a step."""

    max_rows = 2
    max_seq_len = 20

    def __init__(self, *, name: str = "fake", chat_template: str | None = "{}") -> None:
        self.model: Any = SimpleNamespace(
            name=name,
            is_chat=bool(chat_template),
            tokenizer=SimpleNamespace(apply_chat_template=self.apply_chat_template),
            target=SimpleNamespace(device=torch.device("cpu")),
        )
        self.now = Stats(
            steps=0,
            launches=0,
            tokens=0,
            drafted=[4, 2],
            accepted=[2, 1],
            target_passes=4,
            preemptions=0,
            faults=0,
            failures=0,
            running=0,
            waiting=0,
            pages_in_use=[0],
            pages_total=[8],
            seconds=0.0,
        )
        self.requests: list[Request] = []
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.callers: set[int] = set()
        self.fault: Exception | None = None

    @property
    def stats(self) -> Stats:
        return replace(self.now)

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> list[int]:
        assert settings == {
            "add_generation_prompt": True,
            "return_dict": False,
            "tokenizer_kwargs": {"verbose": False},
        }
        if messages[0]["content"] == "loop":
            raise ValueError("roles must alternate")
        return [ord(letter) for m in messages for letter in f"{m['role'][0]}:{m['content']};"]

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        raw: bool,
        on_text: Callable[[str], None],
    ) -> Request:
        self.callers.add(threading.get_ident())
        assert raw
        if prompt == "bug":
            raise KeyError("bug")
        ids = [ord(letter) for letter in prompt] if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError("a prompt is empty")
        request = Request(
            ids,
            params,
            num_drafts=2,
            decode=lambda ids: "".join(map(chr, ids)),
            on_text=on_text,
        )
        self.requests.append(request)
        self.waiting.append(request)
        self.count()
        return request

    def cancel(self, request: Request) -> None:
        self.callers.add(threading.get_ident())
        self.end(request, "cancelled")

    def end(self, request: Request, finish: str, error: str = "") -> None:
        request.end(finish, error)
        request.tell()
        self.running = [other for other in self.running if other is not request]
        self.waiting = [other for other in self.waiting if other is not request]
        self.count()

    def step(self) -> bool:
        self.callers.add(threading.get_ident())
        if self.fault is not None:
            raise self.fault
        while self.waiting and len(self.running) < self.max_rows:
            self.running.append(self.waiting.pop(0))
        for request in list(self.running):
            if request.prompt_ids == [0]:
                self.end(request, "error", "the device reported nonsense")
                continue
            length = len(request.token_ids)
            request.take([request.prompt_ids[length % len(request.prompt_ids)]])
            request.tell()
            self.now.tokens += 1
        self.running = [request for request in self.running if not request.finish]
        self.now.steps += 1
        self.count()
        if self.running:
            time.sleep(0.001)  # an endless text shouldn't take the whole processor
        return bool(self.running or self.waiting)

    def count(self) -> None:
        self.now.running, self.now.waiting = len(self.running), len(self.waiting)
        self.now.pages_in_use = [len(self.running)]


@dataclass
class Served:
    """A server that runs, and clients of it."""

    http: Any
    thread: EngineThread
    openai: openai.OpenAI
    client: httpx2.Client
    port: int

    def post(self, path: str = "completions", **body: Any) -> httpx2.Response:
        return self.client.post(f"/v1/{path}", json={"model": "fake", "prompt": "ab"} | body)

    def metrics(self) -> dict[str, float]:
        response = self.client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        return {
            sample.name + "".join(f"_{value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def wait_for(self, **expected: float) -> None:
        """Wait until metrics have these values."""
        wait_until(lambda: expected.items() <= self.metrics().items())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def serving(engine: Any, *, max_waiting: int = 2) -> Iterator[Served]:
    ready = threading.Event()
    with socket.socket() as listener, EngineThread(engine, max_waiting=max_waiting) as thread:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        http = make_server(thread, engine.model, on_ready=ready.set)
        runner = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
        runner.start()
        assert ready.wait(WAIT)
        url = f"http://127.0.0.1:{port}"
        try:
            with (
                openai.OpenAI(
                    base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=WAIT
                ) as api,
                httpx2.Client(base_url=url, timeout=WAIT) as client,
            ):
                yield Served(http, thread, api, client, port)
        finally:
            http.should_exit = True
            runner.join(WAIT)
            assert not runner.is_alive(), "the server doesn't end"


@pytest.fixture(scope="module", autouse=True)
def terminal(request: pytest.FixtureRequest) -> Iterator[IO[str]]:
    """Give standard error as it is outside of the tests."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        file = os.fdopen(os.dup(2), "w")
    with file:
        yield file
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _no_hang(terminal: IO[str]) -> None:
    """End the tests with the tracebacks of all threads, where one waits for ever.

    That includes the end of what all tests share, behind the last of them.
    """
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=terminal)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails needn't wait for the requests that it leaves."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 0)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served
    assert served.thread.failure or not engine.running + engine.waiting
    assert len(engine.callers) <= 1
    assert threading.get_ident() not in engine.callers


# What OpenAI's client sees.


def test_models(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == ["fake"]
    assert served.openai.models.retrieve("fake").owned_by == "specmeta"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt': this server has 'fake'"):
        served.openai.models.retrieve("gpt")


def test_completion(served: Served) -> None:
    result = served.openai.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert result.object == "text_completion"
    assert result.id.startswith("cmpl-")
    assert result.model == "fake"
    (choice,) = result.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "abcab", "length")
    assert result.usage is not None
    assert result.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
    }


def test_several_prompts(served: Served) -> None:
    for prompt in (["abc", "xy"], [[97, 98, 99], [120, 121]]):
        result = served.openai.completions.create(model="fake", prompt=prompt, max_tokens=4)
        assert [choice.index for choice in result.choices] == [0, 1]
        assert [choice.text for choice in result.choices] == ["abca", "xyxy"]
        assert result.usage is not None
        assert result.usage.total_tokens == 5 + 8
    result = served.openai.completions.create(model="fake", prompt=[97, 98], max_tokens=3)
    assert [choice.text for choice in result.choices] == ["aba"]


@pytest.mark.parametrize("include_usage", [False, True])
def test_completion_in_pieces(served: Served, include_usage: bool) -> None:
    chunks = list(
        served.openai.completions.create(
            model="fake",
            prompt=["abc", "xy"],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": include_usage},
        )
    )
    texts = ["", ""]
    reasons: list[list[str]] = [[], []]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index].append(choice.finish_reason)
    assert texts == ["abca", "xyxy"]
    assert reasons == [["length"], ["length"]]
    assert len(chunks) == 2 * (4 + 1) + include_usage
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage.total_tokens for chunk in chunks if chunk.usage]
    assert usages == ([13] if include_usage else [])
    assert bool(chunks[-1].choices) != include_usage


def test_the_stream_as_it_is_sent(served: Served) -> None:
    response = served.post(max_tokens=1, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *events, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    data = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [item["choices"] for item in data] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}],
    ]
    assert "usage" not in data[0]


MESSAGES: list[Any] = [
    {"role": "developer", "content": "ja"},
    {"role": "user", "content": [{"type": "text", "text": "n"}, {"type": "text", "text": "o"}]},
    {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []},
]
PROMPT = "s:ja;u:no;a:x;"


def test_chat(served: Served) -> None:
    result = served.openai.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=4
    )
    assert result.object == "chat.completion"
    assert result.id.startswith("chatcmpl-")
    (choice,) = result.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == (PROMPT[:4], "length")
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(PROMPT)


def test_chat_in_pieces(served: Served) -> None:
    chunks = list(
        served.openai.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *pieces, last = chunks
    deltas = [chunk.choices[0].delta for chunk in pieces]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None, None]
    assert [delta.content for delta in deltas] == ["", *PROMPT[:3], None]
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 3


def test_a_chat_without_a_limit_goes_to_the_end(served: Served, engine: FakeEngine) -> None:
    result = served.openai.chat.completions.create(model="fake", messages=MESSAGES)
    assert result.usage is not None
    assert result.usage.total_tokens == engine.max_seq_len


def test_a_model_that_does_not_chat() -> None:
    with (
        serving(FakeEngine(chat_template=None)) as served,
        pytest.raises(openai.BadRequestError, match="fake has no chat template: use /v1/compl"),
    ):
        served.openai.chat.completions.create(model="fake", messages=MESSAGES)


def test_a_template_that_refuses(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template: roles must alternate"):
        served.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "loop"}]
        )


def test_a_folder_is_named_without_its_path() -> None:
    with serving(FakeEngine(name="/home/jane/models/persuasion/")) as served:
        assert [model.id for model in served.openai.models.list()] == ["persuasion"]
        assert served.post(model="persuasion").status_code == 200


def test_parameters(served: Served, engine: FakeEngine) -> None:
    settings: dict[str, Any] = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "seed": -3}
    assert served.post(**settings, stop="xyz").status_code == 200
    assert served.post(**settings, stop=["xyz", "b"]).json()["choices"][0] == {
        "index": 0,
        "text": "a",
        "logprobs": None,
        "finish_reason": "stop",
    }
    first, second = (request.params for request in engine.requests)
    assert first == SamplingParams(7, temperature=0.5, top_p=0.25, seed=-3, stop=("xyz",))
    assert second.stop == ("xyz", "b")


def test_defaults(served: Served, engine: FakeEngine) -> None:
    for _ in range(2):
        assert served.post(temperature=None).status_code == 200
    first, second = (request.params for request in engine.requests)
    assert (first.max_new_tokens, first.temperature, first.top_p, first.stop) == (16, 1.0, 1.0, ())
    assert first.seed != second.seed


def test_what_changes_nothing_is_ignored(served: Served) -> None:
    body = {"user": "jane", "n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "suffix": ""}
    body |= {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": None, "metadata": {}}
    assert served.post(**body).status_code == 200
    chat = {"messages": MESSAGES, "prompt": None, "logprobs": False, "tools": [], "store": True}
    chat |= {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"]}
    assert served.post("chat/completions", **chat).status_code == 200


# Errors.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 2}, "n: not supported"),
    "best_of": ({"best_of": 3}, "best_of: not supported"),
    "logprobs": ({"logprobs": 0}, "logprobs: not supported"),
    "echo": ({"echo": True}, "echo: not supported"),
    "penalty": ({"presence_penalty": 0.1}, "presence_penalty: not supported"),
    "bias": ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
    "unknown": ({"top_k": 5}, "top_k: not supported"),
    "long name": ({"x" * 1000: 5}, "x" * 100 + "...: not supported"),
    "messages": ({"messages": MESSAGES}, "messages: not supported"),
    "temperature": ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    "cold": ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
    "top_p": ({"top_p": 0}, "top_p: Input should be greater than 0"),
    "tokens": ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    "no new tokens": ({"max_completion_tokens": 0}, "max_completion_tokens: Input should be"),
    "half a token": ({"max_tokens": 0.5}, "max_tokens: Input should be a valid integer"),
    "a true token": ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    "seed": ({"seed": 2**64}, "seed: Input should be less than"),
    "stop": ({"stop": [""]}, "stop.0: String should have at least 1 character"),
    "stops": ({"stop": list("abcde")}, "stop: List should have at most 4 items"),
    "stream": ({"stream": 1}, "stream: Input should be a valid boolean"),
    "options": ({"stream_options": {"x": 1}}, "stream_options.x: not supported"),
    "no prompt": ({"prompt": None}, "prompt: Field required"),
    "empty prompt": ({"prompt": ""}, "a prompt is empty"),
    "no prompts": ({"prompt": []}, "prompt: expected a string, a list of strings, or token ids"),
    "a number": ({"prompt": 3}, "prompt: expected a string, a list of strings, or token ids"),
    "not ids": ({"prompt": [1, True]}, "prompt: expected a string, a list of strings, or token"),
    "one of two": ({"prompt": ["ab", ""], "max_tokens": ENDLESS}, "a prompt is empty"),
    "many": ({"prompt": ["ab"] * 5}, "prompt: expected at most 4 prompts, got 5"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving(FakeEngine()) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(shared: Served, body: dict[str, Any], message: str, stream: bool) -> None:
    response = shared.post(**{"stream": stream} | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == ("prompt" if "a prompt is" in message else message.split(":")[0])
    shared.wait_for(specmeta_requests_running=0, specmeta_requests_waiting=0)


REFUSED_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"messages": []}, "messages: List should have at least 1 item"),
    "missing": ({}, "messages: Field required"),
    "a tool": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages.0.role: Input should be 'system', 'developer', 'user' or 'assistant'",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content.0.type: Input should be 'text'",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    "name": (
        {"messages": [{"role": "user", "content": "x", "name": "jane"}]},
        "messages.0.name: not supported",
    ),
    "json": (
        {"messages": MESSAGES, "response_format": {"type": "json_object"}},
        "response_format: not supported",
    ),
    "tools": ({"messages": MESSAGES, "tools": [{}]}, "tools: not supported"),
}


@pytest.mark.parametrize(("body", "message"), REFUSED_CHATS.values(), ids=REFUSED_CHATS.keys())
def test_refused_chats(shared: Served, body: dict[str, Any], message: str) -> None:
    response = shared.post("chat/completions", **{"prompt": None} | body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10**5, b"null"]
)
def test_bodies_that_are_not_json_objects(shared: Served, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = shared.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert "JSON" in response.text or "object" in response.text
    assert len(response.text) < 300


def test_other_requests(shared: Served) -> None:
    refused = shared.metrics()["specmeta_requests_total_refused"]
    body = b'{"model": "fake", "prompt": "ab"}'
    for headers in ({}, {"Content-Type": "text/plain"}):
        response = shared.client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 415
        assert "expected application/json" in response.json()["error"]["message"]
    response = shared.post(model="m" * 1000)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert len(response.text) < 400
    assert shared.client.get("/v1/completions").status_code == 405
    assert shared.metrics()["specmeta_requests_total_refused"] == refused + 3
    for path in ("/", "/v1/embeddings", "/v1"):
        response = shared.client.post(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert shared.metrics()["specmeta_requests_total_refused"] == refused + 3


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(shared: Served, chunked: bool) -> None:
    def content() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (completions.MAX_BODY // 16)

    headers = {"Content-Type": "application/json"}
    body: Any = content() if chunked else b"".join(content())
    response = shared.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 413
    assert str(completions.MAX_BODY) in response.json()["error"]["message"]


def test_a_body_of_the_largest_size(shared: Served) -> None:
    body = b'{"model": "fake", "prompt": "ab"}'.ljust(completions.MAX_BODY)
    headers = {"Content-Type": "application/json; charset=utf-8"}
    response = shared.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def test_a_body_that_does_not_come(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "BODY_SECONDS", 0.01)
    with socket.create_connection(("127.0.0.1", shared.port), timeout=WAIT) as connection:
        connection.sendall(HEAD % 100 + b"{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_does_not_come(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    with serving(engine) as served:
        address = ("127.0.0.1", served.port)
        body = {"model": "fake", "prompt": "ab", "max_tokens": ENDLESS, "stream": True}
        data = json.dumps(body).encode()
        with socket.create_connection(address, timeout=WAIT) as asking:
            asking.sendall(HEAD % len(data) + data)
            for begin in (b"", b"POST /v1/comp"):
                with socket.create_connection(address, timeout=WAIT) as silent:
                    silent.sendall(begin)
                    assert silent.recv(100) == b""
            served.wait_for(specmeta_requests_running=1)  # whoever has asked may wait


def test_more_connections_than_there_may_be(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with serving(engine) as served, ExitStack() as stack:
        address = ("127.0.0.1", served.port)
        for _ in range(3):
            stack.enter_context(socket.create_connection(address))
        with (
            socket.create_connection(address, timeout=WAIT) as one_more,
            suppress(ConnectionResetError),
        ):
            assert one_more.recv(100) == b""
        stack.close()
        wait_until(lambda: not served.http.server_state.connections)
        assert served.client.get("/health").status_code == 200


def test_a_client_that_goes_away_within_its_body(
    shared: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall(HEAD % 100 + b"{")
    wait_until(lambda: not shared.http.server_state.tasks)
    assert caplog.text == ""


def test_too_many_requests(served: Served) -> None:
    create = served.openai.completions.create
    streams = [create(model="fake", prompt="a", max_tokens=ENDLESS, stream=True) for _ in range(4)]
    served.wait_for(specmeta_requests_running=2, specmeta_requests_waiting=2)
    with pytest.raises(openai.RateLimitError, match="too many requests: 4 are running or") as error:
        create(model="fake", prompt="a")
    assert error.value.response.headers["Retry-After"] == "1"
    streams.pop().close()
    served.wait_for(specmeta_requests_waiting=1)
    with pytest.raises(openai.RateLimitError):
        create(model="fake", prompt=["a", "b"])
    for stream in streams:
        stream.close()
    served.wait_for(specmeta_requests_running=0, specmeta_requests_waiting=0)
    assert served.post(prompt=["a"] * 4).status_code == 200


# Clients that go away.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_goes_away(
    served: Served, engine: FakeEngine, stream: bool, waits: bool
) -> None:
    body = {"model": "fake", "prompt": "ab", "max_tokens": ENDLESS, "stream": stream}
    data = json.dumps(body).encode()
    address = ("127.0.0.1", served.port)
    connections = [socket.create_connection(address) for _ in range(1 + 2 * waits)]
    for count, connection in enumerate(connections, 1):
        connection.sendall(HEAD % len(data) + data)
        wait_until(lambda count=count: len(engine.requests) == count)
    served.wait_for(
        specmeta_requests_running=1 + waits,
        specmeta_requests_waiting=waits,
        specmeta_pages_in_use_target=1 + waits,
    )
    last = engine.requests[-1]
    connections.pop().close()
    wait_until(lambda: last.finish == "cancelled")
    assert all(not request.finish for request in engine.requests[:-1])
    for connection in connections:
        connection.close()
    served.wait_for(
        specmeta_requests_running=0,
        specmeta_pages_in_use_target=0,
        specmeta_requests_total_cancelled=1 + 2 * waits,
    )
    assert served.post().status_code == 200
    assert served.thread._num_open == 0


def test_several_prompts_go_with_their_client(served: Served) -> None:
    stream = served.openai.completions.create(
        model="fake", prompt=["a", "b", "c"], max_tokens=ENDLESS, stream=True
    )
    next(iter(stream))
    stream.close()
    served.wait_for(specmeta_requests_total_cancelled=3, specmeta_requests_running=0)


# An engine that fails.


def test_an_exception_in_a_step(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stream = iter(
        served.openai.completions.create(model="fake", prompt="a", max_tokens=ENDLESS, stream=True)
    )
    next(stream)
    answers: list[httpx2.Response] = []
    other = threading.Thread(target=lambda: answers.append(served.post(max_tokens=ENDLESS)))
    other.start()
    served.wait_for(specmeta_requests_running=2)
    assert served.client.get("/health").json() == {"status": "ok"}
    engine.fault = RuntimeError("secret")
    message = "the engine has failed (RuntimeError): see the server's log"
    with pytest.raises(openai.APIError, match="the engine has failed") as error:
        list(stream)
    assert error.value.message == message
    other.join()
    assert answers[0].status_code == 500
    assert answers[0].json()["error"] == {
        "message": message,
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert "secret" in caplog.text
    response = served.client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reason": message}
    response = served.post()
    assert response.status_code == 503
    assert response.json()["error"]["message"] == message
    assert response.headers["Retry-After"] == "1"
    assert served.metrics()["specmeta_requests_total_error"] == 2
    assert served.thread._num_open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_fails(served: Served, stream: bool) -> None:
    response = served.post(prompt=[[97], [0]], max_tokens=ENDLESS, stream=stream)
    assert response.status_code == (200 if stream else 500)
    last = response.text.split("\n\n")[-2].removeprefix("data: ") if stream else response.text
    assert json.loads(last)["error"]["message"] == "the device reported nonsense"
    served.wait_for(specmeta_requests_total_error=1, specmeta_requests_total_cancelled=1)
    assert served.post().status_code == 200


def test_a_bug_in_submit(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    stream = served.openai.completions.create(
        model="fake", prompt="a", max_tokens=ENDLESS, stream=True
    )
    response = served.post(prompt="bug")
    assert response.status_code == 500
    assert response.json()["error"]["message"].endswith("see the server's log")
    assert "KeyError" in caplog.text
    next(iter(stream))  # goes on
    stream.close()


# The thread and the process.


def test_the_thread_sleeps_while_nothing_is_to_do(served: Served, engine: FakeEngine) -> None:
    assert served.post().status_code == 200
    wait_until(lambda: not engine.running)
    time.sleep(0.05)
    steps = engine.stats.steps
    time.sleep(0.2)
    assert served.client.get("/health").status_code == 200
    assert engine.stats.steps == steps


def test_metrics(served: Served) -> None:
    assert served.post(prompt=["abc", "de"], max_tokens=4).status_code == 200
    assert served.post(n=2).status_code == 400
    served.wait_for(specmeta_requests_running=0)
    metrics = served.metrics()
    expected = {
        "specmeta_requests_total_length": 2,
        "specmeta_requests_total_refused": 1,
        "specmeta_requests_total_cancelled": 0,
        "specmeta_requests_waiting": 0,
        "specmeta_prompt_tokens_total": 5,
        "specmeta_tokens_total": 8,
        "specmeta_target_passes_total": 4,
        "specmeta_drafted_tokens_total_0": 4,
        "specmeta_drafted_tokens_total_1": 2,
        "specmeta_accepted_tokens_total_0": 2,
        "specmeta_accepted_tokens_total_1": 1,
        "specmeta_acceptance_ratio": 0.5,
        "specmeta_tokens_per_pass": 1.75,
        "specmeta_pages_in_use_target": 0,
        "specmeta_pages_target": 8,
        "specmeta_preemptions_total": 0,
    }
    assert {name: metrics[name] for name in expected} == expected


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_at_the_end_is_told(engine: FakeEngine, stream: bool) -> None:
    answers: list[httpx2.Response] = []
    with serving(engine) as served:
        body = {"max_tokens": ENDLESS, "stream": stream}
        client = threading.Thread(target=lambda: answers.append(served.post(**body)))
        client.start()
        served.wait_for(specmeta_requests_running=1)
        served.http.should_exit = True
        client.join()
    (response,) = answers
    assert response.status_code == (200 if stream else 503)
    assert "the server is shutting down" in response.text
    assert not engine.running


def test_what_runs_at_the_end_may_end(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 60)
    answers: list[httpx2.Response] = []
    with serving(engine) as served:
        client = threading.Thread(target=lambda: answers.append(served.post(max_tokens=500)))
        client.start()
        served.wait_for(specmeta_requests_running=1)
        served.http.should_exit = True
        client.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 500


def test_a_second_signal_ends_what_runs(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 120)
    with serving(engine) as served:
        stream = served.openai.completions.create(
            model="fake", prompt="a", max_tokens=ENDLESS, stream=True
        )
        served.http.handle_exit(signal.SIGINT, None)
        wait_until(lambda: not listens(served.port))
        served.http.handle_exit(signal.SIGINT, None)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)


def test_a_client_that_sends_nothing_does_not_hold_up_the_end(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(completions, "BODY_SECONDS", 90)
    monkeypatch.setattr(server, "ABORT_SECONDS", 0)
    with serving(engine) as served:
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=WAIT)
        connection.sendall(HEAD % 100 + b"{")
        wait_until(lambda: bool(served.http.server_state.tasks))
        served.http.should_exit = True
        with connection, suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert caplog.text == ""


# With the real engine.

PROMPTS = [
    "It is a truth",
    "She had not been long in",
    "Mr. Darcy looked at her with",
    "The letter",
]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def austen() -> models.Model:
    return models.load("austen")


@pytest.fixture(scope="module")
def expected(austen: models.Model) -> list[str]:
    texts = generate(austen, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=0, raw=True).texts
    return [text.text for text in texts]


@pytest.fixture(scope="module")
def real(austen: models.Model) -> Iterator[Served]:
    # Rows for three texts, pages for two.
    engine = Engine(austen, num_drafts=3, max_rows=3, num_pages=10, captured=False)
    with serving(engine, max_waiting=8) as served:
        yield served
        served.wait_for(
            specmeta_requests_running=0, specmeta_requests_waiting=0, specmeta_pages_in_use_target=0
        )
        assert served.metrics()["specmeta_requests_total_error"] == 0


def complete(served: Served, prompt: str | list[int], **settings: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": NEW_TOKENS} | settings
    return served.openai.completions.create(model="austen", prompt=prompt, **settings)


def test_texts_are_those_of_generate(
    real: Served, austen: models.Model, expected: list[str]
) -> None:
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert complete(real, prompt).choices[0].text == text
    ids = austen.tokenizer(PROMPTS[0])["input_ids"]
    result = complete(real, ids)
    assert result.choices[0].text == expected[0]
    assert result.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": len(ids),
        "completion_tokens": NEW_TOKENS,
    }


def test_many_clients_at_once(real: Served, expected: list[str]) -> None:
    texts: dict[tuple[int, bool], str] = {}

    def ask(index: int, stream: bool) -> None:
        result = complete(real, PROMPTS[index], stream=stream)
        pieces = [chunk.choices[0].text for chunk in (result if stream else [result])]
        assert (len(pieces) > 5) == stream
        texts[index, stream] = "".join(pieces)

    before = real.metrics()
    clients = [
        threading.Thread(target=ask, args=(index, stream))
        for index in range(len(PROMPTS))
        for stream in (False, True)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert texts == {(i, stream): text for i, text in enumerate(expected) for stream in (0, 1)}
    real.wait_for(specmeta_pages_in_use_target=0)
    after = real.metrics()
    new = {name: after[name] - before[name] for name in after}
    assert new["specmeta_requests_total_length"] == 8
    assert new["specmeta_tokens_total"] == 8 * NEW_TOKENS
    assert new["specmeta_preemptions_total"] > 0
    drafted, accepted = (
        [new[f"specmeta_{kind}_tokens_total_{position}"] for position in range(3)]
        for kind in ("drafted", "accepted")
    )
    assert 0 < sum(accepted) < sum(drafted)
    assert after["specmeta_tokens_per_pass"] > 1.2
    assert 0.2 < after["specmeta_acceptance_ratio"] < 1


def test_a_client_of_the_real_engine_goes_away(real: Served, expected: list[str]) -> None:
    cancelled = real.metrics()["specmeta_requests_total_cancelled"]
    stream = complete(real, PROMPTS[0], max_tokens=120, stream=True)
    other = complete(real, PROMPTS[1], stream=True)
    next(iter(stream))
    assert real.metrics()["specmeta_pages_in_use_target"] > 0
    stream.close()
    assert "".join(chunk.choices[0].text for chunk in other) == expected[1]
    real.wait_for(specmeta_pages_in_use_target=0, specmeta_requests_total_cancelled=cancelled + 1)


def test_a_seed_repeats_a_text(real: Served, expected: list[str]) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95}
    first, second = (
        complete(real, [PROMPTS[0]] * 2, seed=seed, **settings).choices for seed in (7, 8)
    )
    assert first[0].text == first[1].text
    assert first[0].text != second[0].text
    assert first[0].text != expected[0]
    stream = complete(real, PROMPTS[0], seed=7, stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in stream) == first[0].text
    free = complete(real, [PROMPTS[0]] * 2, **settings).choices
    assert free[0].text != free[1].text


def test_extreme_settings_harm_nobody(real: Served) -> None:
    for settings in ({"temperature": 1e39}, {"temperature": 1e-300}, {"top_p": 1e-300}):
        body = {"model": "austen", "prompt": "It is", "max_tokens": 3, **settings}
        assert real.client.post("/v1/completions", json=body).status_code == 200


def test_a_stop_string(real: Served, expected: list[str]) -> None:
    stop = expected[0][20:25]
    before = expected[0][: expected[0].index(stop)]
    result = complete(real, PROMPTS[0], stop=stop)
    assert (result.choices[0].text, result.choices[0].finish_reason) == (before, "stop")
    chunks = list(complete(real, PROMPTS[0], stop=["nowhere", stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_with_a_template(
    real: Served, austen: models.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = [{"role": "user", "content": "It is"}, {"role": "user", "content": "a"}]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": NEW_TOKENS}
    chat = real.openai.chat.completions
    with pytest.raises(openai.BadRequestError, match="austen has no chat template"):
        chat.create(model="austen", messages=messages, **settings)
    template = "{% for message in messages %}{{ message.content }} {% endfor %}truth"
    monkeypatch.setattr(austen.tokenizer, "chat_template", template)
    result = chat.create(model="austen", messages=messages, **settings)
    text = complete(real, "It is a truth").choices[0].text
    assert result.choices[0].message.content == text
    chunks = chat.create(model="austen", messages=messages, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "word " * 500}, "a prompt of .* tokens and 16 new ones: the limit is 144"),
        ({"max_tokens": 10**30}, f"and {10**30} new ones: the limit is 144"),
        ({"prompt": [1, 10**30]}, "expected ids below 1024, got"),
        ({"prompt": [-1]}, "expected ids of at least 0, got -1"),
        ({"temperature": 1e400}, "temperature: Input should be a finite number"),
    ],
)
def test_what_the_real_engine_refuses(real: Served, body: dict[str, Any], message: str) -> None:
    data = json.dumps({"model": "austen", "prompt": "a"} | body)
    headers = {"Content-Type": "application/json"}
    response = real.client.post("/v1/completions", content=data, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert re.search(message, error["message"])
    assert error["param"] == ("temperature" if "temperature" in body else "prompt")


# The command.

ENDING = "ending: texts have 5 seconds; a second signal ends them now\n"


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield the process and the URL that it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specmeta", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs the tests in the background may ignore it, which is inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.fullmatch(r"austen: (http://127\.0\.0\.1:\d+/v1)\n", line)
            assert match, line + process.communicate()[1]
            yield process, match[1]
        finally:
            process.kill()


def test_the_client_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs/serving.md"
    code = re.search(r"```python\n(import openai.*?)```", page.read_text(), re.DOTALL)
    assert code
    with command() as (_, url):
        example: dict[str, Any] = {}
        exec(code[1].replace("http://127.0.0.1:8000/v1", url), example)
        example["client"].close()
    assert len(capsys.readouterr().out.split()) > 3


def test_sigterm_lets_a_text_end() -> None:
    with command() as (process, url):
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=WAIT) as client:
            stream = client.completions.create(
                model="austen", prompt=PROMPTS[0], max_tokens=4, stream=True
            )
            pieces = [next(iter(stream)).choices[0].text]
            process.send_signal(signal.SIGTERM)
            pieces += [chunk.choices[0].text for chunk in stream]  # to its end
        assert "".join(pieces)
        assert process.communicate(timeout=WAIT) == ("", ENDING)
    assert process.returncode == 0


def test_sigint_twice_ends_the_command_now() -> None:
    with command("--two-model", "-k", "2", "--dtype", "bf16") as (process, url):
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=WAIT) as client:
            stream = client.completions.create(
                model="austen", prompt=PROMPTS[0], max_tokens=450, stream=True
            )
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not listens(int(url.split(":")[2].split("/")[0])))
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
        assert process.communicate(timeout=WAIT) == ("", ENDING)
    assert process.returncode == 130


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


BAD_INPUT = {
    "port": (["--port", "65536"], "port: expected 0 .. 65535, got 65536"),
    "host": (["--host", "nowhere.invalid"], "nowhere.invalid, port 0: "),
    "threads": (["--threads", "0"], "threads: expected 1 .. "),
    "rows": (["--max-rows", "513"], "max_rows: expected 1 .. 512, got 513"),
    "pages": (["--num-pages", "1"], "num_pages: expected 2 .. "),
    "page size": (["--page-size", "0"], "page_size: expected at least 1"),
    "drafts": (["-k", "-1"], "num_drafts: expected at least 0, got -1"),
    "device": (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
    "model": (["--model", "bronte"], "no model 'bronte': expected a directory"),
    "draft": (["--draft", "nowhere"], "nowhere"),
    "draft model": (["--draft-model", "bronte"], "no model 'bronte'"),
    "two drafters": (
        ["--two-model", "--draft-model", "austen"],
        "argument --draft-model: not allowed with argument --two-model",
    ),
    # No machine has an address for it.
    "memory": (["--page-size", str(2**30)], "not enough memory: "),
}


@pytest.fixture
def _signals() -> Iterator[None]:
    """Signal handlers as they were."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--port", "0", *arguments])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"specmeta serve: {message}") or message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("_signals")
def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as exit_:
            cli.main(["serve", "--port", str(port)])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        f"specmeta serve: 127.0.0.1, port {port}: Address already in use\n"
    )


@pytest.mark.usefixtures("_signals")
def test_a_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--port", "0"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "specmeta serve: starlette is missing: pip install 'specmeta[serve]'\n"
    )
