"""Messages -> text -> token ids, by the model's own chat template and tokenizer.

A tokenizer is a folder with `tokenizer.json` and `tokenizer_config.json` (or `chat_template.jinja`
beside it). The folder may appear long after the gateway started; until then its models are not ready.

Templates come with models, so they run in Jinja's immutable sandbox. Work on long prompts goes to one
bounded pool of threads (the tokenizer releases the GIL), so that running streams do not stall.
"""

import asyncio
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from contracts.errors import BadRequest, ContextTooLong, NoCapacity
from gateway.schemas.conversation import Message, for_template

T = TypeVar("T")

LONG_PROMPT_CHARACTERS: Final = 2048
_REASONING_OPENERS: Final = ("<think>", "<seed:think>", "<mm:think>", "[THINK]", "◁think▷")
_NORMALISATION_SLACK: Final = 2  # a normaliser may shorten the text before it is split


class TokenizerUnusable(Exception):
    """The folder is there and cannot be used; the message says which file and why."""


class ChatPrompt:
    """Renders and encodes the messages of one model. Immutable, so threads may share it."""

    def __init__(
        self, tokenizer: Tokenizer, template: jinja2.Template, special: dict[str, str], *, variables: frozenset[str]
    ) -> None:
        """`variables` are those that the template reads."""
        self.variables = variables
        self._tokenizer = tokenizer
        self._template = template
        self._special = special
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocabulary), default=1)
        self.vocabulary = max(vocabulary.values(), default=-1) + 1  # ids are below it

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        extras: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt's text. `extras` are further variables of the template.

        Raises:
            BadRequest: the model's template refuses these messages.
        """
        fixed = {"messages": [for_template(message) for message in messages], "add_generation_prompt": True}
        try:
            return self._template.render({**extras, **self._special, **fixed, "tools": list(tools) or None})
        except jinja2.TemplateError as error:
            raise BadRequest(f"The model's chat template refuses these messages: {error}", param="messages") from None

    def opens_reasoning(self, extras: Mapping[str, Any]) -> bool:
        """Return whether prompts end inside the reasoning, so that answers begin there."""
        return self.render([Message("user", "?")], extras=extras).rstrip().endswith(_REASONING_OPENERS)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        context_tokens: int,
        tools: Sequence[Mapping[str, Any]] = (),
        extras: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            BadRequest: the template refuses the messages.
            ContextTooLong: more text than `context_tokens` of the longest token could hold; encoding megabytes
                of one word takes seconds, so that is not tried.
        """
        text = self.render(messages, tools=tools, extras=extras)
        # The template writes the special tokens itself.
        return self.encode_text(text, context_tokens=context_tokens, add_special_tokens=False)

    def encode_text(
        self, text: str, *, context_tokens: int, field: str = "messages", add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a text. Raises ContextTooLong, as `encode`, which names `field`."""
        fewest_tokens = len(text) // (self._longest_token * _NORMALISATION_SLACK)
        if fewest_tokens > context_tokens:
            raise ContextTooLong(prompt_tokens=fewest_tokens, limit_tokens=context_tokens, at_least=True, param=field)
        # `encode` also works out which character each token comes from.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; an id that is in none is empty."""
        return [self._tokenizer.id_to_token(one) or "" for one in ids]


class PromptWorkshop:
    """Encodes prompts: short ones at once, long ones in its threads."""

    def __init__(self, *, threads: int, max_waiting: int = 256) -> None:
        """`max_waiting` bounds the long prompts in the threads and before them."""
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="prompt")

    async def encode(
        self,
        prompt: ChatPrompt,
        messages: Sequence[Message],
        *,
        body_bytes: int,
        context_tokens: int,
        tools: Sequence[Mapping[str, Any]] = (),
        extras: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of a request whose body had `body_bytes` bytes. Raises BadRequest, ContextTooLong."""
        encode = partial(prompt.encode, messages, context_tokens=context_tokens, tools=tools, extras=extras)
        return await self._run(encode, size=body_bytes)

    async def encode_text(
        self, prompt: ChatPrompt, text: str, *, context_tokens: int, field: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a text that is no conversation. Raises ContextTooLong, NoCapacity."""
        encode = partial(
            prompt.encode_text,
            text,
            context_tokens=context_tokens,
            field=field,
            add_special_tokens=add_special_tokens,
        )
        return await self._run(encode, size=len(text))

    async def decode(self, prompt: ChatPrompt, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises NoCapacity."""
        return await self._run(partial(prompt.decode, ids), size=len(ids))

    async def _run(self, work: Callable[[], T], *, size: int) -> T:
        """Run small work at once and large work in a thread, at most `max_waiting` at a time."""
        if size <= LONG_PROMPT_CHARACTERS:
            return work()
        if self._num_waiting >= self._max_waiting:
            raise NoCapacity("Too many long prompts wait to be tokenised.", retry_after_s=1)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1

    async def load(self, folder: Path) -> ChatPrompt:
        """Return the tokenizer in a folder. Raises TokenizerUnusable."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, load_prompt, folder)

    def close(self) -> None:
        """Let the threads end; work not yet begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _TokenizerConfig(msgspec.Struct):
    chat_template: Any = None
    bos_token: Any = None
    eos_token: Any = None
    pad_token: Any = None
    unk_token: Any = None


def load_prompt(folder: Path) -> ChatPrompt:
    """Return the tokenizer and chat template in a folder.

    Raises:
        TokenizerUnusable: a file is missing or broken.
    """
    config_file = folder / "tokenizer_config.json"
    try:
        config = msgspec.json.decode(config_file.read_bytes(), type=_TokenizerConfig)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except OSError as error:
        raise TokenizerUnusable(f"{error.filename}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise TokenizerUnusable(f"{config_file}: {error}") from None
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception for a bad file
        raise TokenizerUnusable(f"{folder / 'tokenizer.json'}: {error}") from None
    environment = _environment()
    try:
        source = _template_text(folder, config)
        template = environment.from_string(source)
        template.globals = dict(template.globals)  # copied by each rendering: four times as fast as chained maps
        variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
    except jinja2.TemplateError as error:
        raise TokenizerUnusable(f"chat template of {folder}: {error}") from None
    tokens = {name: _token(getattr(config, name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatPrompt(tokenizer, template, tokens, variables=variables)


def _template_text(folder: Path, config: _TokenizerConfig) -> str:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text()
    found = config.chat_template
    if isinstance(found, list):  # several, by name
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise TokenizerUnusable(f"{folder / 'tokenizer_config.json'} has no chat_template")
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja as Hugging Face templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now(dt.UTC).strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:  # noqa: FBT001, FBT002 - Jinja's call
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _token(raw: Any) -> str:
    """Return a special token's text: written as text or as an AddedToken object."""
    if isinstance(raw, dict):
        raw = raw.get("content")
    return raw if isinstance(raw, str) else ""
