"""What the clients of :mod:`server_soak` send, and how they tell a right answer from a wrong one.

Everything is drawn from a random generator, so a seed gives the same requests in the same order to each client.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pilotfish.bench.questions import load_questions

Ending = Literal["read", "close", "reset", "half-close", "cut body", "slow"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_QUESTIONS = [question.turns[0] for question in load_questions()]

_PREFIX = (
    "You are the keeper of a small harbour. These are its rules. Boats under ten metres lie at the north quay, longer "
    "ones at the south quay. Nobody lands fish after eight in the evening. The crane lifts two tonnes, and must be "
    "asked for a day before. Nets are mended on the slip and nowhere else. Visitors pay four coins a night, none in "
    "a storm. The lamp on the mole is lit from dusk to dawn. Dogs are welcome, cats were here first. "
)

_NAMES = ("herring", "mackerel", "sole", "tuna", "sardine", "cod", "eel", "perch", "bream", "pike", "trout", "ling")

_REGEXES = (r"[A-Z][a-z]{2,8} [0-9]{1,3}", r"(yes|no), because [a-z ]{4,30}\.", r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class WrongAnswer(Exception):
    """A response that is not what the request asked for."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request and what must come of it.

    Attributes:
        kind: of load, for the table.
        path: of the POST.
        body: JSON, or the bytes themselves.
        statuses: that the response may have; 4xx are the provoked errors.
        check: of a 200's content; raises :class:`WrongAnswer`. Its argument is the response's object, for streams one
            put together from their chunks.
        repeats: what is the same each time it is asked: the key under which the first answer is kept.
        ending: what the client does: read to the end, go away in some manner, or read slowly.
        content_type: of the body.
    """

    kind: str
    path: str
    body: Mapping[str, Any] | bytes
    statuses: tuple[int, ...] = (200,)
    check: Callable[[dict[str, Any]], None] | None = None
    repeats: str | None = None
    ending: Ending = "read"
    content_type: str = "application/json"

    @property
    def streams(self) -> bool:
        return isinstance(self.body, Mapping) and bool(self.body.get("stream"))


class Requests:
    """Draws requests.

    Args:
        seed: of all of them.
        max_model_len: of the server.
    """

    def __init__(self, seed: int | str, max_model_len: int) -> None:
        self._rng = random.Random(seed)
        self._max_model_len = max_model_len

    def next(self) -> Call:
        """The next request."""
        kinds, weights = zip(*_KINDS.items(), strict=True)
        return self._rng.choices(kinds, weights)[0](self)

    # What ends well

    def greedy(self) -> Call:
        return self._repeated("greedy", {"temperature": 0})

    def seeded(self) -> Call:
        return self._repeated("seeded", {"temperature": 0.9, "top_p": 0.95, "seed": self._rng.randrange(4)})

    def choices(self) -> Call:
        """n = 3: each with noise of its own, and the same each time."""
        return self._repeated("n=3", {"temperature": 1.0, "seed": self._rng.randrange(3), "n": 3})

    def logprobs(self) -> Call:
        rng = self._rng
        body = {"prompt": rng.choice(_QUESTIONS), "temperature": 0, "max_tokens": rng.randint(1, 24), "logprobs": 3}
        return Call("logprobs", COMPLETIONS, self._streamed(body), check=_has_logprobs)

    def stop_strings(self) -> Call:
        stop = self._rng.choice([[".", "?"], [" the"], ["\n"], ["e", "zebra"]])
        return self._repeated("stop strings", {"temperature": 0, "stop": stop}, check=_never_has(stop))

    def prefix(self) -> Call:
        """A long beginning that others have too, of several lengths."""
        rng = self._rng
        system = _PREFIX * rng.randint(1, 4)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{rng.choice(_QUESTIONS)} ({rng.randrange(100)})"},
        ]
        body = {"messages": messages, "temperature": 0.7, "max_tokens": rng.randint(8, 64)}
        return Call("shared prefix", CHAT, self._streamed(body), check=_has_choices)

    def long_output(self) -> Call:
        """Fills the KV cache, so that others lose their pages."""
        body = {"max_tokens": self._rng.randint(200, 400), "ignore_eos": True, "temperature": 0.6}
        return self._chat("long output", body)

    def many_prompts(self) -> Call:
        """A list of prompts, as token ids."""
        rng = self._rng
        prompts = [[rng.randrange(100, 20_000) for _ in range(rng.randint(1, 40))] for _ in range(rng.randint(2, 5))]
        body = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
        return Call("list of prompts", COMPLETIONS, self._streamed(body), check=_has_choices)

    def schema(self) -> Call:
        """One of a few schemas that come again, or one that nobody has seen."""
        rng = self._rng
        is_new = rng.random() < 0.3
        salt = rng.randrange(10**9) if is_new else rng.randrange(4)
        drawn = random.Random(salt)
        names = drawn.sample(_NAMES, 3)
        properties: dict[str, Any] = {
            names[0]: {"enum": drawn.sample(_NAMES, 4)},
            names[1]: {"type": "integer", "minimum": 0, "maximum": drawn.randint(5, 500)},
            names[2]: {"type": "array", "items": {"type": "boolean"}, "maxItems": drawn.randint(1, 4)},
        }
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "fish", "schema": schema}}
        body = {"response_format": form, "temperature": 0.8, "seed": salt % 3, "max_tokens": 80}
        messages = [{"role": "user", "content": "Describe a fish as JSON."}]
        body |= {"messages": messages, **self._speculation()}
        kind = "schema, new" if is_new else "schema, known"
        repeats = None if is_new else f"schema {salt}"
        return Call(kind, CHAT, self._streamed(body), check=_fits(schema), repeats=repeats)

    def regex(self) -> Call:
        pattern = self._rng.choice(_REGEXES)
        body = {"structured_outputs": {"regex": pattern}, "temperature": 1.0, "max_tokens": 40}
        return replace(self._chat("regex", body), check=_matches(pattern))

    def tokens(self) -> Call:
        body = {"prompt": self._rng.choice(_QUESTIONS) + " 🐟 海"}
        return Call("tokenise", "/tokenize", body, check=_counts, repeats=body["prompt"])

    # What is refused

    def too_long(self) -> Call:
        rng = self._rng
        if rng.random() < 0.5:
            prompt: Any = [1 + i % 999 for i in range(self._max_model_len + rng.randint(0, 50))]
        else:
            prompt = _PREFIX * (self._max_model_len // 60)
        return Call("too long", COMPLETIONS, {"prompt": prompt, "max_tokens": 4}, (400,), _has_error)

    def malformed(self) -> Call:
        rng = self._rng
        path = rng.choice([CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
        raw = rng.choice(
            [
                b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe\x00", b'{"messages": [', b"[" * 5_000,
                rng.randbytes(rng.randint(1, 200)), b'{"prompt": "\\ud800", "messages": 3}', b'{"max_tokens": NaN}',
            ]
        )  # fmt: skip
        return Call("malformed", path, raw, (400,), _has_error)

    def wrong_field(self) -> Call:
        field, status = self._rng.choice(_WRONG)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **field}
        return Call("wrong field", CHAT, self._streamed(body), (status,), _has_error)

    def wrong_type(self) -> Call:
        body = {"prompt": "Hello"}
        return Call("wrong type", COMPLETIONS, body, (400,), _has_error, content_type="text/plain")

    # Clients that go, or dawdle

    def leaving(self) -> Call:
        endings: list[Ending] = ["close", "reset", "half-close"]
        ending = self._rng.choice(endings)
        n = self._rng.choice([1, 1, 2])
        call = self._chat(ending, {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "n": n})
        return replace(call, ending=ending, check=None)

    def cut_body(self) -> Call:
        return replace(self._chat("cut body", {"max_tokens": 50}), ending="cut body", check=None)

    def slow_reader(self) -> Call:
        call = self._chat("slow reader", {"max_tokens": 40, "temperature": 0, "stream": True})
        return replace(call, ending="slow")

    # Parts

    def _repeated(
        self, kind: str, settings: dict[str, Any], check: Callable[[dict[str, Any]], None] | None = None
    ) -> Call:
        """A question with settings that give the same text each time, streamed or not, with any drafts or none."""
        question = self._rng.choice(_QUESTIONS[:8])
        max_tokens = self._rng.choice([16, 48])
        key = json.dumps([question, settings, max_tokens])
        call = self._chat(kind, {**settings, "max_tokens": max_tokens}, question)
        return replace(call, repeats=key, check=check or _has_choices)

    def _chat(self, kind: str, settings: dict[str, Any], question: str | None = None) -> Call:
        messages = [{"role": "user", "content": question or self._rng.choice(_QUESTIONS)}]
        body = self._streamed({"messages": messages, **self._speculation(), **settings})
        return Call(kind, CHAT, body, check=_has_choices)

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Some stream, some of these with usage or with our statistics."""
        rng = self._rng
        if "stream" not in body and rng.random() < 0.6:
            body = {**body, "stream": True}
        if body.get("stream") and rng.random() < 0.5:
            body = {**body, "stream_options": {"include_usage": True}}
        return body | ({"include_speculation_stats": True} if rng.random() < 0.2 else {})

    def _speculation(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.6:
            return {}
        return {"speculation": {"enabled": rng.random() < 0.5, "num_drafts": rng.randint(1, 3)}}


_WRONG: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": -1}, 400),
    ({"temperature": "hot"}, 400),
    ({"top_p": 2}, 400),
    ({"max_tokens": 0}, 400),
    ({"n": 0}, 400),
    ({"seed": 1.5}, 400),
    ({"logit_bias": {"x": 1}}, 400),
    ({"stop": [1]}, 400),
    ({"messages": []}, 400),
    ({"messages": [{"role": "user"}]}, 400),
    ({"unknown_field": 1}, 400),
    ({"tools": [{"type": "function"}]}, 400),
    ({"model": "gpt-4"}, 404),
    ({"structured_outputs": {"regex": "("}}, 400),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, 400),
)

_KINDS: dict[Callable[[Requests], Call], int] = {
    Requests.greedy: 10,
    Requests.seeded: 14,
    Requests.choices: 6,
    Requests.logprobs: 6,
    Requests.stop_strings: 6,
    Requests.prefix: 10,
    Requests.long_output: 5,
    Requests.many_prompts: 4,
    Requests.schema: 10,
    Requests.regex: 4,
    Requests.tokens: 6,
    Requests.too_long: 3,
    Requests.malformed: 8,
    Requests.wrong_field: 8,
    Requests.wrong_type: 1,
    Requests.leaving: 12,
    Requests.cut_body: 2,
    Requests.slow_reader: 2,
}


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's chunks as the object that the call would have given without streaming.

    Raises:
        WrongAnswer: a chunk is an error, or a choice has no end.
    """
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if "error" in event:
            raise WrongAnswer(f"the stream ended with an error: {event['error']}")
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "finish_reason": None, "logprobs": None})
            choice["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            choice["logprobs"] = part["logprobs"] or choice["logprobs"]
    return {"choices": [{"index": index, **choice} for index, choice in sorted(choices.items())]}


def texts_of(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(text, why it ended) of each choice; of an answer without choices, its JSON."""
    if "choices" not in answer:
        return [(json.dumps(answer, sort_keys=True), "")]
    return [
        (choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"])
        for choice in answer["choices"]
    ]


def _has_choices(answer: dict[str, Any]) -> None:
    texts = texts_of(answer)
    if not texts or not all(reason in ("stop", "length") for _, reason in texts):
        raise WrongAnswer(f"choices that did not end: {texts}")
    if any("\ufffd" in text[-1:] for text, reason in texts if reason == "length"):
        raise WrongAnswer(f"a text ends in a broken character: {texts}")


def _has_logprobs(answer: dict[str, Any]) -> None:
    _has_choices(answer)
    for choice in answer["choices"]:
        values = choice["logprobs"]["token_logprobs"]
        if not values or any(value > 1e-6 for value in values):
            raise WrongAnswer(f"log-probabilities {values}")


def _never_has(stop: list[str]) -> Callable[[dict[str, Any]], None]:
    def check(answer: dict[str, Any]) -> None:
        _has_choices(answer)
        for text, _ in texts_of(answer):
            if any(word in text for word in stop):
                raise WrongAnswer(f"stop={stop} is in {text!r}")

    return check


def _fits(schema: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def check(answer: dict[str, Any]) -> None:
        import jsonschema

        _has_choices(answer)
        for text, reason in texts_of(answer):
            if reason == "stop":
                try:
                    jsonschema.validate(json.loads(text), schema)
                except (ValueError, jsonschema.ValidationError) as error:
                    raise WrongAnswer(f"{text!r} does not fit {schema}") from error

    return check


def _matches(pattern: str) -> Callable[[dict[str, Any]], None]:
    def check(answer: dict[str, Any]) -> None:
        _has_choices(answer)
        for text, reason in texts_of(answer):
            if reason == "stop" and not re.fullmatch(pattern, text):
                raise WrongAnswer(f"{text!r} does not match {pattern!r}")

    return check


def _counts(answer: dict[str, Any]) -> None:
    if answer["count"] != len(answer["tokens"]) or not answer["tokens"]:
        raise WrongAnswer(f"{answer['count']} tokens counted: {answer['tokens']}")


def _has_error(answer: dict[str, Any]) -> None:
    error = answer.get("error")
    if not isinstance(error, dict) or not error.get("message") or set(error) != {"message", "type", "param", "code"}:
        raise WrongAnswer(f"not an error object: {answer}")
