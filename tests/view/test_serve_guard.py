"""The guard by itself: what it lets through, and to whom its cookie belongs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette.types", reason="starlette is not installed here")
pytest.importorskip("uvicorn", reason="uvicorn is not installed here")
from starlette.types import Message, Receive, Scope, Send

from ringside.view.server.app import HttpGuard

TOKEN = "secret"


class Page:
    """An application that answers 200 and counts what reached it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope["type"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def ask(guard: HttpGuard, kind: str = "http", query: str = "", **headers: str) -> list[Message]:
    """Return what is sent in answer to a request for /, which calls this host by its address."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read from a reader")

    fields = {"host": "127.0.0.1:8777", **headers}
    scope: dict[str, Any] = {
        "type": kind,
        "method": "GET",
        "path": "/",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
    }
    asyncio.run(guard(scope, receive, send))
    return sent


def status_of(answer: list[Message]) -> int:
    status: int = answer[0]["status"]
    return status


def cookie_of(guard: HttpGuard) -> str:
    """Return the cookie that a guard gives to who knows the token."""
    headers = dict(ask(guard, query=f"token={TOKEN}")[0]["headers"])
    cookie: str = headers[b"set-cookie"].decode().split(";")[0]
    return cookie


def test_a_cookie_opens_the_server_that_gave_it_and_no_other_with_the_same_token() -> None:
    one, other = (HttpGuard(Page(), token=TOKEN) for _ in range(2))
    assert status_of(ask(one, cookie=cookie_of(one))) == 200
    assert status_of(ask(other, cookie=cookie_of(one))) == 401


@pytest.mark.parametrize("token", ["", TOKEN])
def test_of_what_is_no_request_only_the_servers_own_start_and_end_reach_the_page(token: str) -> None:
    page = Page()
    guard = HttpGuard(page, token=token)
    assert ask(guard, "websocket", authorization=f"Bearer {TOKEN}") == []
    assert page.reached == []
    ask(guard, "lifespan")
    assert page.reached == ["lifespan"]
