"""The options of a call, and the request that they make."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack, get_type_hints

from hermes.arguments import bad_argument, build
from hermes.messages import Messages, chat_messages, chat_tools
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import invalid_argument


class PromptOptions(TypedDict, total=False):
    """What every call takes. An option that is None counts as not given."""

    text: str | None
    """Raw text instead of messages, tokenized as completion prompts are."""
    token_ids: Sequence[int] | None
    """An assembled prompt instead of messages."""
    system: str | None
    """A system message before the others."""
    tools: Sequence[str | Mapping[str, Any]]
    """Functions that the model may call, as JSON text or mappings."""
    add_generation_prompt: bool | None
    """Open the assistant's turn at the end; else true."""
    continue_final_message: bool | None
    """Leave the last assistant message open for the model to go on with."""
    template_kwargs: Mapping[str, Any] | None
    """Extra variables of the chat template."""
    namespace: str | None
    """Callers of different namespaces never share cached work."""
    cache_read: bool | None
    """Look in the caches; else true."""
    cache_write: bool | None
    """Add to the caches; else true."""
    max_prompt_tokens: int | None
    """Drop the oldest rounds of a conversation until it fits this window; without it a longer one is refused."""
    keep_last_rounds: int | None
    """Rounds at the end that are always kept; without max_prompt_tokens, the window is the server's."""
    model: str | None
    """The served model's name; else whatever is served."""
    request_id: str | None
    """Shown in logs and traces; made up where empty."""
    timeout: float | None
    """Seconds for the whole call; else the client's."""


class GenerateOptions(PromptOptions, total=False):
    """What an answer takes besides. An option not given takes the model's own setting, else what the contract says."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    n: int | None
    """Independent samples of the one prompt."""
    logprobs: int | None
    """0 gives the chosen token's log-probability, k the k likeliest besides."""
    allowed_token_ids: Sequence[int] | None
    stop: str | Sequence[str] | None
    """Strings that end a sample."""
    include_stop: bool | None
    """Keep the stop string in the text."""
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    affinity_key: str | None
    """Calls with the same key go to the same executor."""


class AssembleOptions(PromptOptions, total=False):
    """What an assembly takes besides."""

    return_text: bool | None
    """Return the text that the ids stand for; else true."""


_PROMPT_OPTIONS: Final = frozenset(get_type_hints(PromptOptions))
_GENERATE_OPTIONS: Final = frozenset(get_type_hints(GenerateOptions))
_ASSEMBLE_OPTIONS: Final = frozenset(get_type_hints(AssembleOptions))


def generate_request(
    messages: Messages | None, **options: Unpack[GenerateOptions]
) -> assembler_pb2.AssemblerGenerateRequest:
    """Raises TypeError for an unknown option, HermesError for a value that cannot be sent."""
    _refuse_unknown(options, _GENERATE_OPTIONS)
    stop = options.get("stop") or ()
    return build(
        assembler_pb2.AssemblerGenerateRequest,
        request_id=options.get("request_id"),
        model=options.get("model"),
        prompt=_prompt(messages, options),
        cache=_cache(options),
        truncation=_truncation(options),
        sampling=build(
            types_pb2.SamplingParams,
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            min_p=options.get("min_p"),
            repetition_penalty=options.get("repetition_penalty"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            seed=options.get("seed"),
            logit_bias=options.get("logit_bias"),
            n=options.get("n"),
            logprobs=options.get("logprobs"),
            allowed_token_ids=options.get("allowed_token_ids"),
        ),
        stopping=build(
            types_pb2.StopParams,
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens"),
            stop_token_ids=options.get("stop_token_ids"),
            ignore_eos=options.get("ignore_eos"),
        ),
        stop=[stop] if isinstance(stop, str) else stop,
        include_stop=options.get("include_stop"),
        affinity_key=options.get("affinity_key"),
    )


def assemble_request(messages: Messages | None, **options: Unpack[AssembleOptions]) -> assembler_pb2.AssembleRequest:
    """Raises TypeError for an unknown option, HermesError for a value that cannot be sent."""
    _refuse_unknown(options, _ASSEMBLE_OPTIONS)
    return_text = options.get("return_text")
    return build(
        assembler_pb2.AssembleRequest,
        request_id=options.get("request_id"),
        model=options.get("model"),
        prompt=_prompt(messages, options),
        cache=_cache(options),
        truncation=_truncation(options),
        return_text=True if return_text is None else return_text,
    )


def explain_request(messages: Messages | None, **options: Unpack[PromptOptions]) -> assembler_pb2.ExplainRequest:
    """Raises TypeError for an unknown option, HermesError for a value that cannot be sent."""
    _refuse_unknown(options, _PROMPT_OPTIONS)
    return build(
        assembler_pb2.ExplainRequest,
        request_id=options.get("request_id"),
        model=options.get("model"),
        prompt=_prompt(messages, options),
        cache=_cache(options),
        truncation=_truncation(options),
    )


def _prompt(messages: Messages | None, options: PromptOptions) -> assembler_pb2.Prompt:
    text, token_ids = options.get("text"), options.get("token_ids")
    prompts = {"messages": messages, "text": text, "token_ids": token_ids}
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) > 1:
        raise invalid_argument("PROMPT_CONFLICT", f"A prompt is one of {', '.join(given)}: give only one of them.")
    if text is not None:
        return build(assembler_pb2.Prompt, text=text)
    if token_ids is not None:
        return assembler_pb2.Prompt(token_ids=build(assembler_pb2.TokenIds, {"ids": "token_ids"}, ids=token_ids))
    if messages is None:
        raise invalid_argument("PROMPT_MISSING", "There is no prompt: give messages, text or token_ids.")
    return assembler_pb2.Prompt(chat=_chat(messages, options))


def _chat(messages: Messages, options: PromptOptions) -> assembler_pb2.Chat:
    return build(
        assembler_pb2.Chat,
        messages=chat_messages(messages, options.get("system")),
        tools=chat_tools(options.get("tools") or ()),
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message"),
        template_kwargs_json=_template_kwargs(options.get("template_kwargs")),
    )


def _template_kwargs(template_kwargs: Mapping[str, Any] | None) -> str | None:
    try:
        return json.dumps(template_kwargs, ensure_ascii=False) if template_kwargs else None
    except (TypeError, ValueError) as error:
        raise bad_argument("template_kwargs", "has a value that JSON cannot hold") from error


def _cache(options: PromptOptions) -> types_pb2.CachePolicy:
    return build(
        types_pb2.CachePolicy,
        {"read": "cache_read", "write": "cache_write"},
        namespace=options.get("namespace"),
        read=options.get("cache_read"),
        write=options.get("cache_write"),
    )


def _truncation(options: PromptOptions) -> assembler_pb2.Truncation | None:
    window, rounds = options.get("max_prompt_tokens"), options.get("keep_last_rounds")
    if window is None and rounds is None:
        return None
    return build(
        assembler_pb2.Truncation,
        mode=assembler_pb2.Truncation.MODE_ROUNDS,
        max_prompt_tokens=window,
        keep_last_rounds=rounds,
    )


def _refuse_unknown(options: Iterable[str], known: frozenset[str]) -> None:
    # a mapping with a misspelt option would otherwise be read as one without it
    if unknown := sorted(set(options) - known):
        raise TypeError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
