"""JSON bodies -> Structs, with OpenAI's words for what is wrong."""

import re
from typing import Any, Final, TypeVar

import msgspec

from contracts.errors import BadRequest

T = TypeVar("T")

MAX_SAMPLES: Final = 8
_MAX_STOPS: Final = 4
_MAX_STOP_CHARACTERS: Final = 256
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")


def decode_body(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Return the request in a body.

    Raises:
        BadRequest: not JSON, nested too deeply, or a field that is missing or wrong; `param` names it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}.") from None
    except RecursionError:
        raise BadRequest("We could not parse the JSON body of your request: it is nested too deeply.") from None


def bad_field(text: str) -> BadRequest:
    """Return the error for msgspec's message, such as "Expected `int`, got `str` - at `$.max_tokens`"."""
    missing = re.search(r"missing required field `(\w+)`", text)
    path = _PATH.search(text)
    field = path.group(1) if path else ""
    what = _PATH.sub("", text)
    if missing:
        field = f"{field}.{missing.group(1)}" if field else missing.group(1)
        return BadRequest(f"Missing required parameter: '{field}'.", param=field)
    return BadRequest(f"Invalid value for '{field}': {what}." if field else f"{what}.", param=field or None)


def stops_of(stop: str | list[str] | None, *, field: str = "stop") -> tuple[str, ...]:
    """Return the stop strings of a request. Raises BadRequest when there are too many, or one has a bad length."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > _MAX_STOPS:
        raise BadRequest(f"'{field}' takes up to {_MAX_STOPS} strings, got {len(stops)}.", param=field)
    for one in stops:
        if not 0 < len(one) <= _MAX_STOP_CHARACTERS:
            raise BadRequest(f"A stop string has 1 to {_MAX_STOP_CHARACTERS} characters.", param=field)
    return stops


def refuse_unsupported(asked: dict[str, Any]) -> None:
    """Raise BadRequest for the first field whose value is true: it would change the answer and is not supported."""
    for field, wanted in asked.items():
        if wanted:
            raise BadRequest(f"'{field}' is not supported.", param=field)
