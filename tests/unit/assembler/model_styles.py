"""Model directories in the styles of the families that people serve: their templates, small tokenizers of a kind."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "styles"
CORPUS = [
    "You are a helpful assistant. What is the capital of France? Paris is the capital of France.",
    'def f(x): return {"a": [x, None], "type": "object", "properties": {}}',
    "<|im_start|> system user assistant tool <think> </think> [INST] [/INST] <s> </s>",
    "Grüße, 你好, здравствуйте, नमस्ते 🎉 naïve café",
] * 4


@dataclass(frozen=True)
class Style:
    """special: control tokens. plain: added tokens that are not special, but role marks all the same.

    pieces: SentencePiece's kind of tokenizer, else byte-level BPE.
    The rest is what the template takes.
    """

    name: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    pieces: bool = False
    system: bool = True
    alternate: bool = False
    tools: bool = False
    calls: bool = False
    results: bool = False
    date: bool = False
    reasoning: bool = False
    arguments_are_text: bool = False
    one_call: bool = False

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")

    def write(self, directory: Path) -> Path:
        """The model's directory, as far as an assembler reads it."""
        tokenizer = _sentence_pieces() if self.pieces else _byte_level()
        tokenizer.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in self.special])
        tokenizer.add_tokens([tokenizers.AddedToken(each, special=False, normalized=False) for each in self.plain])
        tokenizer.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.source}
        if self.bos:
            config["bos_token"] = self.bos
        if self.eos:
            config["eos_token"] = self.eos
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (directory / "config.json").write_text("{}")
        return directory


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN_MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|fim_hole|>",
)
LLAMA3_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>", *(f"<|reserved_special_token_{place}|>" for place in range(100)),
)  # fmt: skip
DEEPSEEK_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
DEEPSEEK_MARKS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁sep｜>", "<think>", "</think>",
)  # fmt: skip
MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
COMMAND_R_TOKENS = (
    "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
)  # fmt: skip

STYLES = [
    Style("chatml", CHATML_TOKENS, eos="<|im_end|>"),
    Style("smollm2", CHATML_TOKENS, eos="<|im_end|>"),
    Style("llama2", ("<s>", "</s>"), bos="<s>", eos="</s>", pieces=True, alternate=True),
    Style(
        "llama3_1", LLAMA3_TOKENS, bos="<|begin_of_text|>", eos="<|eot_id|>", tools=True, calls=True, results=True,
        date=True, one_call=True,
    ),
    Style(
        "mistral", MISTRAL_TOKENS, bos="<s>", eos="</s>", pieces=True, alternate=True, tools=True, calls=True,
        results=True,
    ),
    Style(
        "gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("\n\n", "  ", "<unused0>", "<h1>"),
        bos="<bos>", eos="<eos>", pieces=True, system=False, alternate=True,
    ),
    Style(
        "qwen3", CHATML_TOKENS, QWEN_MARKS, eos="<|im_end|>", tools=True, calls=True, results=True, reasoning=True,
    ),
    Style("phi3", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>"),
    Style(
        "phi4_mini", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("<|tool|>", "<|/tool|>"), eos="<|endoftext|>", tools=True,
    ),
    Style("zephyr", ("<s>", "</s>"), bos="<s>", eos="</s>", pieces=True),
    Style(
        "deepseek", DEEPSEEK_TOKENS, DEEPSEEK_MARKS, bos=DEEPSEEK_TOKENS[0], eos=DEEPSEEK_TOKENS[1], calls=True,
        results=True, arguments_are_text=True,
    ),
    Style("command_r", COMMAND_R_TOKENS, bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", alternate=True),
    Style(
        "hermes", CHATML_TOKENS, ("<tool_call>", "</tool_call>"), bos="<|endoftext|>", eos="<|im_end|>", tools=True,
        calls=True, results=True,
    ),
    Style(
        "qwen3_coder", CHATML_TOKENS, ("<tool_call>", "</tool_call>"), eos="<|im_end|>", tools=True, calls=True,
        results=True,
    ),
    Style(
        "glm4", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "sop"),
        eos="<|user|>", results=True,
    ),
]  # fmt: skip


def _byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentence_pieces() -> tokenizers.Tokenizer:
    """As Llama 2's: spaces are pieces' beginnings, rare characters are bytes, BOS and its like are pieces too."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted({letter for text in CORPUS for letter in text if letter != " "})
    merged = ["th", "in", "er", "an", "▁t", "▁a", "is", "st", "<s", "</"]
    vocab = {piece: at for at, piece in enumerate([*pieces, *letters, *merged])}
    merges = [("t", "h"), ("i", "n"), ("e", "r"), ("a", "n"), ("▁", "t"), ("▁", "a"), ("i", "s"), ("s", "t")]
    merges += [("<", "s"), ("<", "/")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
