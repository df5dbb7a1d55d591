"""The turns of a chat and the tools in it, as a chat template takes them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Called(_Strict):
    """A function and its arguments, of an earlier turn."""

    name: Name
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _are_an_object(cls, text: str) -> str:
        """Refuse what no template could show.

        Raises:
            ValueError: If it is no JSON object.
        """
        try:
            found = json.loads(text or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("must be the text of a JSON object")  # noqa: TRY004
        return text


class Call(_Strict):
    """A tool call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None


class Message(_Strict):
    """One turn. Clients send back what they got, so fields of an answer may be here too."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: Name | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        """Join the parts of a text.

        Raises:
            ValueError: If a part is something else.
        """
        if not isinstance(content, list):
            return content
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError('must be text, or a list of parts {"type": "text", "text": ...}')
        return "".join(text for text in texts if text)

    def for_template(self) -> dict[str, Any]:
        """The turn as templates know it: ``developer`` is a newer name of ``system``."""
        turn = self.model_dump(
            exclude_none=True, exclude={"annotations", "refusal", "audio", "function_call"}
        )
        turn["role"] = "system" if self.role == "developer" else self.role
        turn.setdefault("content", "")
        for call in turn.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        return turn


class Function(_Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Strict):
    """A tool, of the one kind that there is."""

    type: Literal["function"]
    function: Function
