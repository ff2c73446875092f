"""Methods that can be called on the class as well, which then makes the instance.

`Sandbox.create(image="host")` is `Sandbox(image="host").create()`. Such a method takes no arguments of its own and
returns its instance; on the class, it takes the arguments of the class.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")


class OnClassToo:
    def __init__(self, method: Callable[[Any], Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def _bound(self, instance: Any, owner: Any) -> Any:
        if instance is not None:
            return types.MethodType(self._method, instance)

        def make(*args: Any, **options: Any) -> Any:
            return self._method(owner(*args, **options))

        functools.update_wrapper(make, self._method)
        make.__wrapped__ = owner  # type: ignore[attr-defined]  # its arguments are those of the class
        return make


class on_class_too(OnClassToo):  # noqa: N801 -- a decorator, such as `property`
    """Decorates an asynchronous method."""

    @overload
    def __get__(self, instance: None, owner: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, instance: T, owner: type[T]) -> Callable[[], Coroutine[Any, Any, T]]: ...

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._bound(instance, owner)


class on_class_too_sync(OnClassToo):  # noqa: N801
    """Decorates a synchronous method."""

    @overload
    def __get__(self, instance: None, owner: Callable[P, T]) -> Callable[P, T]: ...

    @overload
    def __get__(self, instance: T, owner: type[T]) -> Callable[[], T]: ...

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._bound(instance, owner)
