"""What a model directory says about its tokenizer and chat template beside tokenizer.json."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shared.errors import StartupError

NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Named tokens that transformers 5.24's tokenizer classes bring when tokenizer_config.json has none, for the classes
# that chat models are shipped with. `…Fast` is the same class.
_CLASS_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    "CodeGenTokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "CodeLlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "GPTNeoXTokenizer": {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
    },
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text as it stands, before the model's own splitting.

    special: not shown as text; the other flags are those of `tokenizers`.
    is_complete: whether the flags were declared, and so win over the ones in tokenizer.json.
    """

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """named: special tokens by the names that templates know them by, such as bos_token.
    added: tokens that have to be in the tokenizer, also where tokenizer.json lacks them, in the order of their ids.
    chat_template: the model's Jinja source, None when it has none.
    tool_template: another one for chats with tools, where the model has it.
    """

    named: Mapping[str, str]
    added: tuple[AddedToken, ...]
    chat_template: str | None
    tool_template: str | None = None


def load(directory: Path) -> TokenizerConfig:
    """Reads tokenizer_config.json, its older companions and the template files. Raises StartupError."""
    config = _json_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # Before tokenizer_config.json listed the added tokens, this file had the last word on special ones.
        config |= _json_object(directory / "special_tokens_map.json")
    try:
        named = _class_defaults(config) | {name: _content(token) for name, token in _declared(config)}
        chat_templates = _chat_templates(directory, config)
        return TokenizerConfig(
            named=MappingProxyType(named),
            added=tuple(_added(config, named)),
            chat_template=chat_templates.get("default"),
            tool_template=chat_templates.get("tool_use"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StartupError(
            f"The tokens or chat templates that {directory} declares are damaged ({type(error).__name__}: {error}): "
            "prepare the model again."
        ) from error


def read_json(path: Path) -> Any:
    """The file's JSON. Raises StartupError."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"Cannot read {path} ({error.strerror}): check the model directory.") from error
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON ({error}): prepare the model again.") from error


def _json_object(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object: prepare the model again.")
    return value


def _class_defaults(config: Mapping[str, Any]) -> dict[str, str]:
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    return dict(_CLASS_DEFAULTS.get(name, {}))


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _declared(config: Mapping[str, Any]) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """The tokens that have a name of their own: the usual ones, and the model's, such as image_token."""
    for name in NAMED_TOKENS:
        if config.get(name) is not None:
            yield name, config[name]
    for name, token in config.items():
        is_token = isinstance(token, str) or (isinstance(token, Mapping) and token.get("__type") == "AddedToken")
        if name.endswith("_token") and name not in NAMED_TOKENS and is_token:
            yield name, token
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        yield from extra.items()


def _token(token: str | Mapping[str, Any], *, special: bool) -> AddedToken:
    flags: Mapping[str, Any] = {} if isinstance(token, str) else token
    return AddedToken(
        _content(token),
        special=special,
        single_word=bool(flags.get("single_word")),
        lstrip=bool(flags.get("lstrip")),
        rstrip=bool(flags.get("rstrip")),
        normalized=bool(flags.get("normalized", not special)),
    )


def _added(config: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[AddedToken]:
    """Every token that the config declares, once, in the order in which transformers adds them."""
    seen: set[str] = set()
    names = set(named.values())
    listed = config.get("added_tokens_decoder") or {}
    for token_id in sorted(listed, key=int):
        token = listed[token_id]
        seen.add(_content(token))
        declared = _token(token, special=bool(token.get("special")) or _content(token) in names)
        yield replace(declared, is_complete=True)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    for token in (*(token for _, token in _declared(config)), *(() if isinstance(extra, Mapping) else extra)):
        if _content(token) not in seen:
            seen.add(_content(token))
            yield _token(token, special=True)


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name; most have only the default one. Files win over the config, as in transformers."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").exists():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}
