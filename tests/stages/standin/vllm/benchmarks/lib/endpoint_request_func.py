"""Where a real load generator looks up how a request is sent; the stand-in sends none."""

from typing import Any


async def send(*_: Any, **__: Any) -> None:
    pass


ASYNC_REQUEST_FUNCS = {"openai": send}
