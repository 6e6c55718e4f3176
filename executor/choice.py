"""The next token of each sequence, and how likely the model itself held it.

Log-probabilities are the model's own: taken before penalties, bias, temperature and every other change to the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from executor.events import Choice, TokenLogprob
from executor.requests import Sequence
from executor.sampler import SampleRow, TokenHistory, TokenRules, sample


@torch.inference_mode()
def choose(logits: Tensor, sequences: Rows[Sequence]) -> list[Choice]:
    """Chooses a token for each sequence from its row of `[sequences, vocab]` logits, which are overwritten."""
    asking = [i for i, sequence in enumerate(sequences) if sequence.request.sampling.logprobs is not None]
    table = logits[asking].log_softmax(-1) if asking else None
    tokens = sample(logits, [_row(sequence, logits) for sequence in sequences])
    choices = [Choice(token) for token in tokens]
    if table is not None:
        wanted = [sequences[i].request.sampling.logprobs or 0 for i in asking]
        for i, choice in zip(asking, _likely(table, [tokens[i] for i in asking], wanted), strict=True):
            choices[i] = choice
    return choices


def _likely(table: Tensor, tokens: list[int], wanted: list[int]) -> Iterator[Choice]:
    """The chosen tokens with their log-probabilities, and as many of the likeliest as each row wants."""
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])[:, 0].tolist()
    values, ids = table.topk(max(wanted))
    for i, (token, logprob) in enumerate(zip(tokens, chosen, strict=True)):
        count = wanted[i]
        likeliest = zip(ids[i, :count].tolist(), values[i, :count].tolist(), strict=True)
        yield Choice(token, logprob, tuple(TokenLogprob(*pair) for pair in likeliest))


def _row(sequence: Sequence, logits: Tensor) -> SampleRow:
    """How a sequence's token is to be chosen. Makes its history the first time that a penalty asks for it."""
    request = sequence.request
    if sequence.history is None and TokenHistory.needed(request.sampling):
        generated = sequence.tokens[len(request.prompt) :]
        sequence.history = TokenHistory(request.prompt, generated, logits.shape[-1], logits.device)
    early = sequence.generated < request.stopping.min_tokens
    job = sequence.job
    if job.rules is None and TokenRules.needed(request.sampling, early=early):
        job.rules = TokenRules(request.sampling, request.stopping.stop_token_ids, logits.device)
    return SampleRow(request.sampling, sequence.seed, sequence.generated, sequence.history, job.rules, early)
