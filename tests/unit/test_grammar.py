"""Masks of grammars: what they let through, where they end, and that drafts leave no trace."""

from __future__ import annotations

import json
import random
import re
import string
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jsonschema
import numpy as np
import pytest

from fakes import EOS, VOCAB_SIZE
from helpers_grammar import byte_level_tokenizer, json_tokenizer, sentencepiece_tokenizer
from pilotfish.errors import RequestError
from pilotfish.grammar import MAX_SOURCE_BYTES, GrammarCompiler, GrammarMatcher
from pilotfish.text import Tokenizer
from pilotfish.types import SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "array", "items": {"enum": [1, True, "x"]}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = "a(b|é)+[0-2]{2}"
CHOICES = ["ab", "abc", 'a"b', "é", "x-1"]
GRAMMAR = 'start: "[" [start ("," start)*] "]" | /[0-2]/\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return json_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))


def walk(matcher: GrammarMatcher, rng: random.Random, limit: int = 200, end: float = 0.5) -> list[int]:
    """Tokens drawn from the masks, EOS with probability ``end`` where it is allowed beside others."""
    tokens: list[int] = []
    while not matcher.ended and len(tokens) < limit:
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        others = [token for token in allowed if token != EOS]
        ends = EOS in allowed and (not others or rng.random() < end)
        tokens.append(EOS if ends else rng.choice(others))
        matcher.commit(tokens[-1])
    assert matcher.error is None
    return tokens


def bracketed(text: str) -> bool:
    """Whether ``GRAMMAR`` derives it."""
    while True:
        shorter = re.sub(r"\[([0-2](,[0-2])*)?\]", "0", text)
        if shorter == text:
            return bool(re.fullmatch("[0-2]", text))
        text = shorter


@pytest.mark.parametrize("kind", ["json", "json text", "json_object", "regex", "choice", "grammar"])
def test_what_the_masks_let_through_is_what_was_asked_for(
    kind: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    asked = {
        "json": StructuredOutputs(json=SCHEMA),
        "json text": StructuredOutputs(json=json.dumps(SCHEMA)),
        "json_object": StructuredOutputs(json_object=True),
        "regex": StructuredOutputs(regex=REGEX),
        "choice": StructuredOutputs(choice=CHOICES),
        "grammar": StructuredOutputs(grammar=GRAMMAR),
    }[kind]
    texts = set()
    for seed in range(60):
        tokens = walk(compiler.compile(asked).matcher(), random.Random(seed))
        if tokens[-1] != EOS:
            continue  # an endless string
        text = tokenizer.decode(tokens)
        texts.add(text)
        if kind.startswith("json"):
            value = json.loads(text)
            jsonschema.validate(value, {"type": "object"} if kind == "json_object" else SCHEMA)
            assert text in (json.dumps(value, ensure_ascii=False), text.replace(": ", ":").replace(", ", ",")) or (
                "\n" not in text and "  " not in json.dumps(value)
            )
        elif kind == "regex":
            assert re.fullmatch(REGEX, text)
        elif kind == "choice":
            assert text in CHOICES
        else:
            assert bracketed(text)
    assert len(texts) > 3
    assert kind != "choice" or texts == set(CHOICES)


def test_between_json_tokens_there_is_at_most_one_blank_and_only_after_a_separator(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(StructuredOutputs(json=SCHEMA))

    def fits(text: str) -> bool:
        ids = tokenizer.encode(text)
        return grammar.matcher().num_allowed(ids) == len(ids)

    assert fits('{"a":"x","b":[1,true]}') and fits('{"a": "x", "b": [1, true]}')
    for text in ('{ "a"', '{"a" :', '{"a":  "x"', '{"a":"x" ,', '{"a":"x","b":[ 1', '{"a":"x","b":[1 ]'):
        assert not fits(text), text


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_special_tokens_never_match_as_text(make: Any) -> None:
    """Their names can be written, in tokens of text."""
    tokenizer: Tokenizer = make()
    eos = tokenizer.eos_token_ids
    special = tokenizer.special_token_ids - set(eos)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, eos)
    constants = ["a<|im_end|>b", "</s>", "<|x|>", "<s><unk>", "<tool>", "  ab é", "日本🐟"]
    for constant in constants:
        for asked in (
            StructuredOutputs(json={"const": constant}),
            StructuredOutputs(choice=[constant]),
            StructuredOutputs(regex=re.escape(constant)),
        ):
            matcher = compiler.compile(asked).matcher()
            tokens: list[int] = []
            while not matcher.ended:
                allowed = matcher.allowed()
                assert not allowed[list(special)].any()
                assert allowed[list(eos)].sum() in (0, allowed.sum()), "it is complete at the end only"
                tokens.append(int(np.flatnonzero(allowed)[0]))
                matcher.commit(tokens[-1])
            assert matcher.error is None
            text = tokenizer.decode([*tokenizer.encode("a"), *tokens])[1:]
            assert text == (json.dumps(constant, ensure_ascii=False) if asked.json is not None else constant)
    free = compiler.compile(StructuredOutputs(regex="(?s:.*)")).matcher().allowed()
    assert free[list(eos)].all() and not free[list(special)].any() and free.sum() > 90


def test_logits_wider_or_narrower_than_the_vocabulary(tokenizer: Tokenizer) -> None:
    asked = StructuredOutputs(regex="(a|b|é|t|\\{)*")
    full = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,)).compile(asked).matcher().allowed()
    wide = GrammarCompiler(tokenizer, 100, (EOS, 99, 100)).compile(asked).matcher().allowed()
    assert wide.shape == (100,) and (wide[:VOCAB_SIZE] == full).all()
    assert np.flatnonzero(wide[VOCAB_SIZE:]).tolist() == [99 - VOCAB_SIZE], "EOS beyond the vocabulary, not padding"
    narrow = GrammarCompiler(tokenizer, 20, (3, EOS)).compile(asked).matcher().allowed()
    assert narrow.shape == (20,) and narrow[3] and (np.delete(narrow, 3) == np.delete(full[:20], 3)).all()


def test_eos_and_stop_tokens_come_where_the_grammar_is_complete(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    a, b, x = (tokenizer.encode(text)[0] for text in "abx")
    grammar = compiler.compile(StructuredOutputs(regex="ab*"))
    matcher = grammar.matcher(stop_token_ids=[x, b])
    assert np.flatnonzero(matcher.allowed()).tolist() == sorted([a, *tokenizer.encode("ab")])
    matcher.commit(a)
    assert np.flatnonzero(matcher.allowed()).tolist() == sorted([b, x, EOS])
    matcher.commit(b)
    assert not matcher.ended, "the grammar goes on with it"
    matcher.commit(x)
    assert matcher.ended and matcher.error is None
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]

    endless = grammar.matcher(ignore_eos=True)
    assert not endless.allowed([a])[EOS] and not endless.allowed([a, b])[EOS]
    only = compiler.compile(StructuredOutputs(regex="ab")).matcher(ignore_eos=True)
    assert np.flatnonzero(only.allowed([a, b])).tolist() == [EOS]


def test_drafts_are_allowed_one_after_the_other(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(json=SCHEMA))
    good = [*tokenizer.encode('{"a":"x","b":[]}'), EOS]
    x = tokenizer.encode("x")[0]
    assert grammar.matcher().num_allowed(good) == len(good)
    assert grammar.matcher().num_allowed([*good, EOS, x]) == len(good), "the first that ends it is the last"
    for position in range(len(good) - 1):
        matcher, wrong = grammar.matcher(), [*good[:position], EOS, *good[position:]]
        assert matcher.num_allowed(wrong) == position
        assert np.flatnonzero(matcher.allowed(wrong[: position + 1])).tolist() == [EOS], "never nothing"
        assert matcher.num_allowed(good) == len(good), "a forbidden draft leaves no trace"
        for token in good:
            matcher.commit(token)
        assert matcher.ended and matcher.error is None


@pytest.mark.parametrize("seed", range(30))
def test_drafts_leave_no_trace(seed: int, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Whatever was proposed, accepted and rejected, masks are those of a matcher that only saw what was committed."""
    rng = random.Random(seed)
    asked = [
        StructuredOutputs(json=SCHEMA),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="(a|bc|é){1,40}0?"),
        StructuredOutputs(grammar=GRAMMAR),
    ][seed % 4]
    grammar = compiler.compile(asked)
    matcher, committed = grammar.matcher(), list[int]()

    def fresh(drafts: Sequence[int]) -> np.ndarray[Any, Any]:
        plain = grammar.matcher()
        for token in [*committed, *drafts]:
            plain.commit(token)
        return plain.allowed()

    while not matcher.ended and len(committed) < 40:
        drafts, count = list[int](), 0
        for _ in range(rng.randint(0, 3)):
            drafts = []
            for _ in range(rng.randint(0, 6)):
                mask = matcher.allowed(drafts)
                assert (mask == fresh(drafts)).all()
                right = rng.random() < 0.8
                drafts.append(rng.choice(np.flatnonzero(mask).tolist()) if right else rng.randrange(VOCAB_SIZE))
                if not mask[drafts[-1]] or drafts[-1] == EOS:
                    break
            count = matcher.num_allowed(drafts)
            assert count >= len(drafts) - 1
        for token in drafts[: rng.randint(0, count)]:
            matcher.commit(token)
            committed.append(token)
            if matcher.ended:
                break
        if not matcher.ended:
            bonus = rng.choice(np.flatnonzero(matcher.allowed()).tolist())
            matcher.commit(bonus)
            committed.append(bonus)
            assert matcher.ended or (matcher.allowed() == fresh([])).all()
    assert matcher.error is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json": "{"}, "json cannot be used"),
        ({"json": "3"}, "'3' is no schema here: it must be an object, or the JSON text of one"),
        ({"json": "true"}, "{} stands for any JSON, where JSON Schema also has true"),
        ({"json": {"type": "fish"}}, "fish"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": {"$ref": "#"}}, "no output"),
        ({"json": {"enum": []}}, "empty"),
        ({"json": {"const": {1, 2}}}, "set"),
        ({"json": {"const": float("nan")}}, "json cannot be used"),
        ({"json": {"const": "\ud800"}}, "not JSON serializable"),
        ({"regex": "("}, "regex cannot be used"),
        ({"regex": "\\b"}, "regex cannot be used"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"choice": ["a", "\ud800"]}, "surrogates"),
        ({"grammar": "begin: /a/"}, "grammar cannot be used"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "start: start"}, "no output"),
        ({"regex": "zzz"}, "no output"),  # letters that no token has
        ({"choice": ["x" * MAX_SOURCE_BYTES]}, str(MAX_SOURCE_BYTES)),
    ],
)
def test_what_cannot_be_compiled_is_refused(asked: Mapping[str, Any], words: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        compiler.compile(StructuredOutputs(**asked))
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 450 and "\n" not in str(caught.value)


HOSTILE: Mapping[str, dict[str, Any]] = {
    "deep json": {"json": '{"a":' * 10_000 + "1" + "}" * 10_000},
    "many properties": {"json": {"properties": {f"a{i}": {} for i in range(4000)}}},
    "bound beyond 64 bits": {"json": {"type": "integer", "minimum": -(10**30)}},
    "deep regex": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "deep rule": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "2**60 letters": {"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"'},
    "2**60 rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "a"'},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused(name: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutputs(**HOSTILE[name]))
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 450


def test_an_assertion_of_the_library_that_fails_is_said_in_one_line(compiler: GrammarCompiler) -> None:
    parts = [{"anyOf": [{"required": [f"p{i}{j}"], "type": "object"} for j in "abc"]} for i in range(8)]
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutputs(json={"allOf": parts}))
    reason = "it is too large or too complex for the grammar library. Use a smaller or simpler one."
    assert str(caught.value) == f"structured_outputs.json cannot be used: {reason}"


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"enum": [f"{i:05}" for i in range(5000)]}},
        {"json": {"type": "array", "minItems": 10**9}},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    ],
    ids=["enum", "array", "regex"],
)
def test_large_grammars_are_compiled(asked: Mapping[str, Any], compiler: GrammarCompiler) -> None:
    assert compiler.compile(StructuredOutputs(**asked)).matcher().allowed().any()


def test_rules_that_refer_to_each_other_in_a_long_chain(tokenizer: Tokenizer) -> None:
    """Recursion as deep as the longest source allows; a thread with the usual stack would take the process down."""
    letters = string.ascii_lowercase
    names = [a + b + c for a in letters for b in letters for c in letters]
    for count, body in ((8000, "{}"), (3500, '"x"{}|"y"')):
        rules = "\n".join(f"{name}:{body.format(below)}" for name, below in pairwise(names[: count + 1]))
        source = f'start:{names[0]}\n{rules}\n{names[count]}:"a"'
        assert 0.7 * MAX_SOURCE_BYTES < len(source) < MAX_SOURCE_BYTES
        matcher = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,)).compile(StructuredOutputs(grammar=source)).matcher()
        assert matcher.allowed()[tokenizer.encode("a" if count == 8000 else "x")[0]]


def test_an_engine_without_an_end_or_a_fast_tokenizer_says_so(tokenizer: Tokenizer) -> None:
    asked = StructuredOutputs(regex="a")
    with pytest.raises(RequestError, match="names no EOS token"):
        GrammarCompiler(tokenizer, VOCAB_SIZE, ()).compile(asked)

    class Slow:
        special_token_ids = frozenset[int]()

        def to_json(self) -> str | None:
            return None

    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        GrammarCompiler(Slow(), VOCAB_SIZE, (EOS,)).compile(asked)


def test_the_least_recently_used_grammar_goes_first(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), max_cached=2)
    first, second, third = (StructuredOutputs(regex=text) for text in ("a", "b", "ab"))
    one, two = compiler.compile(first), compiler.compile(second)
    assert compiler.compile(StructuredOutputs(regex="a")) is one
    compiler.compile(third)
    assert compiler.num_cached == 2
    assert compiler.compile(first) is one and compiler.compile(second) is not two
    assert one.matcher().allowed()[tokenizer.encode("a")[0]]


def test_threads_compile_and_match_at_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), max_cached=3)
    wanted = [StructuredOutputs(regex=f"(ab|c){{{i}}}") for i in range(1, 7)]
    expected = [walk(compiler.compile(asked).matcher(), random.Random(7)) for asked in wanted]
    got: list[list[list[int]]] = []

    def work() -> None:
        got.append([walk(compiler.compile(asked).matcher(), random.Random(7)) for asked in wanted * 5])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected * 5] * 4


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "nothing: set exactly one of json, json_object, regex, choice, grammar"),
        ({"json": "{}", "regex": "a"}, "json and regex"),
        ({"json_object": 1}, "json_object=1"),
        ({"json": 3}, "json=3"),
        ({"json": True}, "json=True"),
        ({"regex": ""}, "regex=''"),
        ({"grammar": 4}, "grammar=4"),
        ({"choice": []}, "choice has []"),
        ({"choice": "abc"}, "choice has 'abc'"),
        ({"choice": ["a", ""]}, "choice has ''"),
        ({"choice": ["a", None]}, "choice has None"),
    ],
)
def test_settings_that_make_no_sense(asked: Mapping[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        StructuredOutputs(**asked)
    assert caught.value.param == "structured_outputs"


def test_sampling_parameters_take_nothing_else() -> None:
    with pytest.raises(RequestError, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert StructuredOutputs(json={}).kind == "json"
