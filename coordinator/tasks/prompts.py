"""Messages to token ids and token ids to text, from the files beside a model; neither torch nor transformers."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer

# What a chat template may name, as in tokenizer_config.json.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptError(ValueError):
    """A model directory lacks what is needed to write prompts for it, or its template refuses these messages."""


class PromptCodec:
    """The chat template and the tokenizer of the model in `model_dir`, in Hugging Face's layout.

    Gives the ids of transformers' `apply_chat_template(messages, add_generation_prompt=True)`, with one difference:
    templates see no clock (`strftime_now` is undefined), so that a prompt is the same on every day.

    Raises PromptError, which names the file, where there is no tokenizer or no chat template.
    """

    def __init__(self, model_dir: Path | str) -> None:
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise PromptError(f"{path} is missing: without it there are no prompts for this model")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise PromptError(f"{path} is not a tokenizer: {error}") from error
        # A file saved by a training script may carry both; a prompt must be cut or filled by nobody.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        self._special = _special_tokens(config)
        self._template = _compile(*_template_source(directory, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that stand for some text, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render(self, messages: Iterable[tuple[str, str]]) -> str:
        """The text of a prompt that asks for the next turn of the assistant. Raises PromptError."""
        conversation = [{"role": role, "content": content} for role, content in messages]
        if not conversation:
            raise PromptError("a prompt needs at least one message")
        try:
            return self._template.render(
                messages=conversation, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # an expression of a template can raise anything
            raise PromptError(f"the chat template refuses these messages: {error}") from error

    def encode(self, messages: Iterable[tuple[str, str]]) -> list[int]:
        """Token ids of `render(messages)`; special tokens come from the template alone. Raises PromptError."""
        return list(self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of bare text, without template."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int], eos_ids: Collection[int]) -> str | None:
        """The text before the first end-of-sequence token, or None where there is none.

        Nothing is dropped: a special token reads as its name, and an id without a token (models pad their
        vocabulary) as U+FFFD. Otherwise an answer could carry invisible tokens and still count as right.
        """
        end = next((place for place, token in enumerate(tokens) if token in eos_ids), None)
        if end is None:
            return None
        runs: list[list[int]] = [[]]
        for token in tokens[:end]:
            if 0 <= token < 2**32 and self._tokenizer.id_to_token(token) is not None:
                runs[-1].append(token)
            else:
                runs.append([])
        return "\ufffd".join(self._tokenizer.decode(run, skip_special_tokens=False) for run in runs)


def eos_token_ids(model_dir: Path | str) -> tuple[int, ...]:
    """End-of-sequence ids from generation_config.json, else config.json, in the file's order.

    Raises PromptError where neither file names one, or names something else than token ids.
    """
    directory = Path(model_dir)
    for name in ("generation_config.json", "config.json"):
        found = _read_json(directory / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise PromptError(f"{directory / name}: eos_token_id is {found!r}, not token ids")
        return tuple(dict.fromkeys(ids))
    raise PromptError(f"neither generation_config.json nor config.json in {directory} has an eos_token_id")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PromptError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"{path} holds no JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names and texts; a text is a string or, in older files, an object with `content`."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_source(directory: Path, config: dict[str, Any]) -> tuple[str, Path]:
    """The template and the file it stands in: chat_template.jinja wins over the entry in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), path
    path = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise PromptError(
            f"{path} has no chat_template and there is no chat_template.jinja beside it: "
            "a base model without one needs a template file before it can be asked anything"
        )
    return template, path


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training masks; for a prompt it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """`namespace()` of templates, without the attribute names that lead into the interpreter."""

    def __init__(self, **values: Any) -> None:
        for name in values:
            _refuse_underscore(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict()` of templates: a function, since a class would come with its methods."""
    return dict(*args, **kwargs)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, sort_keys: bool = False, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _compile(source: str, path: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals = {
        "range": environment.globals["range"],  # the sandbox's own, of bounded length
        "dict": _dict,
        "namespace": _Namespace,
        "raise_exception": _refuse,
    }
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise PromptError(f"{path}: the chat template does not compile: {error}") from error
