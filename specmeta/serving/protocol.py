"""OpenAI's protocol: what a client may send, and the errors that it may get."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from starlette.responses import JSONResponse, Response

from specmeta.serving.request import SamplingParams

if TYPE_CHECKING:
    from specmeta.models import Model

__all__ = [
    "FINISH_REASONS",
    "ApiError",
    "Body",
    "ChatBody",
    "Prompt",
    "StreamOptions",
    "TextBody",
    "no_model",
    "parse",
    "public_name",
    "shorten",
]

Prompt = str | list[int]

RETRY_SECONDS = 1
# By how a `Request` has finished: OpenAI's word for it.
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}

# Parameters of OpenAI that change nothing here.
HARMLESS = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Parameters that would change the answer, with the values that ask for nothing; so does null.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class ApiError(Exception):
    """An answer that isn't a text.

    Parameters
    ----------
    status : int
        The HTTP status.
    message : str
        The reason, for the client to read.
    param : str, optional
        The parameter that's wrong.
    code : str, optional
        OpenAI's name of the error.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the error in OpenAI's form."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


class _Part(BaseModel):
    """What all objects in a request have in common: they say what they don't take."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: item
            for key, item in value.items()
            if item is not None and key not in HARMLESS and not _is_neutral(key, item)
        }


def _is_neutral(key: str, value: object) -> bool:
    # In Python, but not in JSON, 0 == False.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL.get(key, ())
    )


class StreamOptions(_Part):
    """What a stream is to bring along."""

    include_usage: bool = False
    include_obfuscation: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Body(_Part):
    """The parameters that both kinds of completion have."""

    model: str
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=4), BeforeValidator(_as_list)
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def params(self, default_tokens: int) -> SamplingParams:
        """Return how to choose a text, of `default_tokens` where no limit is given."""
        tokens = (self.max_completion_tokens, self.max_tokens, default_tokens)
        return SamplingParams(
            max_new_tokens=next(count for count in tokens if count is not None),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
            stop=tuple(self.stop),
        )


def _read_prompts(value: Any) -> list[Prompt]:
    def are(kind: type, values: object) -> bool:
        return isinstance(values, list) and all(type(item) is kind for item in values)

    if isinstance(value, str) or (value and are(int, value)):
        return [value]
    if value and isinstance(value, list) and all(type(i) is str or are(int, i) for i in value):
        return list(value)
    raise ValueError("expected a string, a list of strings, or token ids")


class TextBody(Body):
    """What a completion is asked for with: prompts, given as a string, a list, or token ids."""

    prompt: Annotated[list[Prompt], PlainValidator(_read_prompts)]


class _TextPart(_Part):
    type: Literal["text"]
    text: str


def _text_as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_TextPart], BeforeValidator(_text_as_parts)]

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates know it."""
        # OpenAI's new name of the role; templates know the old one.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatBody(Body):
    """What a chat is asked for with."""

    messages: Annotated[list[_Message], Field(min_length=1)]


_B = TypeVar("_B", bound=Body)


def parse(kind: type[_B], body: bytes) -> _B:
    """Read a body.

    Parameters
    ----------
    kind : type
        `TextBody` or `ChatBody`.
    body : bytes
        JSON.

    Returns
    -------
    Body
        Of that kind.

    Raises
    ------
    ApiError
        400 and the first parameter that's wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    name = shorten(".".join(map(str, first["loc"])))
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "not supported"
    raise ApiError(400, f"{name}: {reason}" if name else reason, param=name or None)


def shorten(name: str) -> str:
    """Return a client's word, of any length, as far as an answer repeats it."""
    return name if len(name) <= 100 else name[:100] + "..."


def public_name(model: Model) -> str:
    """Return a model's name for clients: where a folder lies is nobody's business."""
    return Path(model.name).resolve().name


def no_model(name: str, expected: str) -> ApiError:
    """Return the error for a client that asks for another model than the one `expected`."""
    return ApiError(
        404,
        f"no model {shorten(name)!r}: this server has {expected!r}",
        param="model",
        code="model_not_found",
    )
