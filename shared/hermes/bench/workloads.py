"""The workloads as conversations: what each user says, round by round."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hermes.bench.loads import Load, Workload
from hermes.bench.prose import Prose
from hermes.messages import Message


@dataclass(frozen=True, slots=True)
class Script:
    """One user's part, written before the first request."""

    openings: tuple[Message, ...]
    """What stands before everything else: one for all rounds, or one a round where nothing may be shared."""
    questions: tuple[str, ...]
    """One a round."""
    grows: bool
    """Every round sends all questions and answers before it again, as chat clients do."""

    def opening(self, place: int) -> Message:
        """The system message of a round, counted from 0."""
        return self.openings[place % len(self.openings)]


def scripts(load: Load, seed: int) -> list[Script]:
    """What all users of a run say. The same load and seed give the same; two seeds share nothing."""
    return [_WRITERS[load.workload](load, seed, user) for user in range(load.users)]


_DESCRIPTION_WORDS: Final = 12  # of a function, and of each of its parameters
_PARAMETERS: Final = 2
_FUNCTION_WORDS: Final = _DESCRIPTION_WORDS * (1 + _PARAMETERS)
_DOCUMENTS: Final = 3
_DOCUMENT_SHARE: Final = 0.9  # of what a user of documents sends; the rest asks


def _service(load: Load, seed: int, user: int) -> Script:
    return Script((_system(load, seed),), _questions(load, seed, user), grows=True)


def _independent(load: Load, seed: int, user: int) -> Script:
    return Script((_system(load, seed),), _questions(load, seed, user), grows=False)


def _code(load: Load, seed: int, user: int) -> Script:
    # In the system text, and not as a request's `tools`: many chat templates leave those out.
    functions = Prose(seed, "functions")
    count = max(1, round(load.words / _FUNCTION_WORDS))
    listed = "\n".join(json.dumps(_function(functions)) for _ in range(count))
    text = f"{functions.name(3)}: you write programs. These functions can be called:\n{listed}"
    return Script((Message("system", text),), _questions(load, seed, user), grows=True)


def _rag(load: Load, seed: int, user: int) -> Script:
    asked = tuple(_documents(Prose(seed, user, place, "documents"), load.question) for place in range(load.rounds))
    return Script((_system(load, seed),), asked, grows=False)


def _unique(load: Load, seed: int, user: int) -> Script:
    openings = tuple(_system(load, seed, user, place) for place in range(load.rounds))
    return Script(openings, _questions(load, seed, user), grows=False)


_WRITERS: Final[Mapping[Workload, Callable[[Load, int, int], Script]]] = {
    Workload.SERVICE: _service,
    Workload.QUESTIONS: _independent,
    Workload.CODE: _code,
    Workload.RAG: _rag,
    Workload.UNIQUE: _unique,
}


def _system(load: Load, *names: object) -> Message:
    """A system text; another one for other names, from its first word on."""
    return Message("system", Prose(*names, "system").text(load.words))


def _questions(load: Load, seed: int, user: int) -> tuple[str, ...]:
    prose = Prose(seed, user, "questions")
    return tuple(prose.text(load.question) for _ in range(load.rounds))


def _documents(prose: Prose, words: int) -> str:
    length = max(1, round(words * _DOCUMENT_SHARE / _DOCUMENTS))
    documents = [f"[{number}] {prose.text(length)}" for number in range(1, _DOCUMENTS + 1)]
    return "\n\n".join([*documents, prose.text(max(1, words - _DOCUMENTS * length))])


def _function(prose: Prose) -> dict[str, object]:
    parameters = {
        prose.name(1): {"type": "string", "description": prose.text(_DESCRIPTION_WORDS)} for _ in range(_PARAMETERS)
    }
    return {
        "name": prose.name(),
        "description": prose.text(_DESCRIPTION_WORDS),
        "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
    }
