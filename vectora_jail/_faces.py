"""Turn methods of the coroutine core into blocking methods with the same signature."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ._waiting import drive

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")


def blocking(
    part: str, function: Callable[Concatenate[C, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that runs `function` on `self.<part>` to its end."""

    @wraps(function)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return drive(function(getattr(self, part), *args, **kwargs))

    return call


def awaitable(
    part: str, function: Callable[Concatenate[C, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method that returns the coroutine of `function` on `self.<part>`."""

    @wraps(function)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return function(getattr(self, part), *args, **kwargs)

    return call
