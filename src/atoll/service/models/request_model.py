"""What the bodies of all requests have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from atoll.model.spelling import NONE, before, renamed


class RequestModel(BaseModel):
    """The body of a request. Names may be in camel case, and the error for an unknown name suggests the right one."""

    model_config = ConfigDict(extra="forbid")
    other_names: ClassVar[Mapping[str, str]] = NONE
    """Other names that are accepted, such as those of earlier versions, and the fields that they stand for."""
    of: ClassVar[str] = "this request"
    """What the names belong to, for error messages."""

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(cls.translated, value)

    @classmethod
    def translated(cls, given: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the same values under the names of the fields. Raises SpecError."""
        return renamed(given, cls.model_fields, cls.other_names, of=cls.of)
