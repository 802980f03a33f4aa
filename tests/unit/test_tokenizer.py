"""The Tokenizer: encoding, decoding, chat messages, and one-line errors for what cannot be encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers_gguf import CHAT_TEMPLATE, Vocabulary, byte_level_vocabulary, tiny_model, write_gguf
from pilotfish.errors import CheckpointError, RequestError
from pilotfish.models.checkpoint import resolve_model
from pilotfish.text.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello 12?"}]


def folder_of(vocabulary: Vocabulary, root: Path) -> Path:
    """A folder with the tokenizer's files; the tokenizer's alone, no model's."""
    path = write_gguf(root / "m.gguf", tiny_model("llama"), vocabulary=vocabulary)
    checkpoint = resolve_model(str(path), cache=False)
    folder = root / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint.path / name).rename(folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(byte_level_vocabulary(settings={"ggml.add_bos_token": True}), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    text = "hello 12 \U0001f41f\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>" + text
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.decode([]) == ""
    assert all(type(token_id) is int for token_id in ids)


def test_decode_cleans_nothing_up(tokenizer: Tokenizer) -> None:
    text = "do n't , stop ! ok"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_texts_give_no_warning(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("x" * 1000)) == 1001  # model_max_length is 128; warnings are errors here


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 271
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_token_ids == {0, 1, 2}  # <think>, 3, is user-defined: it stays in the text
    assert tokenizer.has_chat_template


def test_token_text(tokenizer: Tokenizer) -> None:
    (hello,) = tokenizer.encode(" hello", add_special_tokens=False)
    assert tokenizer.token_text(hello) == " hello"
    assert tokenizer.token_text(2) == "<|im_end|>"
    first_byte_of_fish = tokenizer.encode("\U0001f41f", add_special_tokens=False)[0]
    assert tokenizer.token_text(first_byte_of_fish) == "\ufffd"


def test_chat_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello 12?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert ids.count(1) == 3  # the tokenizer's own BOS is not added to the template's
    assert type(ids) is list
    assert all(type(token_id) is int for token_id in ids)
    without_prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(without_prompt, skip_special_tokens=False) == expected.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_chat_content_in_parts(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "12?"}]
    assert tokenizer.apply_chat_template([MESSAGES[0], {"role": "user", "content": parts}]) == (
        tokenizer.apply_chat_template(MESSAGES)
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages=\[\]: must be a list of at least one message"),
        ("hello", "messages='hello': must be a list"),
        (None, "messages=None: must be a list"),
        (["hello"], r"messages\[0\]='hello': must be an object with 'role' and 'content'"),
        ([MESSAGES[0], {"content": "x"}], r"messages\[1\]\.role=None: must be a string such as 'user'"),
        ([{"role": "user"}], r"messages\[0\]\.content=None: must be a string or a list of text parts"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content=3"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 200}}]}],
            r"messages\[0\]\.content\[0\]=\{'type': 'image_url'.*\.\.\.: must be",
        ),
        ([{"role": "pirate", "content": "arr"}], "chat template refuses them: TemplateError: Unknown role pirate"),
    ],
)
def test_bad_messages(messages: Any, message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"], "\ud800"])
def test_bad_text(text: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_model_without_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(byte_level_vocabulary(settings={"chat_template": ""}), tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template; send a plain prompt instead \(--no-chat\)"):
        tokenizer.apply_chat_template(MESSAGES)


def test_chat_template_in_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    """As transformers 5 saves it."""
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    again = Tokenizer.from_folder(tmp_path)
    assert again.apply_chat_template(MESSAGES) == Tokenizer.from_folder(folder).apply_chat_template(MESSAGES)


def test_folder_whose_config_names_no_class(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = "hello 12"
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode(text) == reference.encode(text)


def test_text_that_is_no_unicode_is_refused_in_prompts_and_in_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the prompt is not valid Unicode text") as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"messages\[0\]\.content is not valid Unicode text") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "a\ud800"}])
    assert caught.value.param == "messages" and "\n" not in str(caught.value)


def test_folders_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer; expected tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    (broken / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="broken: the tokenizer cannot be loaded"):
        Tokenizer.from_folder(broken)


def test_texts_that_cannot_fit_are_refused_unencoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = len("<|endoftext|>")
    limited = tokenizer.for_context(10)
    fits = "x" * longest * 9
    assert limited.encode(fits) == tokenizer.encode(fits)
    chat = [{"role": "user", "content": "x" * 10}]
    assert limited.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    message = r"at least 10 tokens \(118 characters\); the context \(max_model_len\) is 10 tokens .* at most 9\."
    monkeypatch.setattr(type(limited._hf), "__call__", lambda *_, **__: pytest.fail("it was encoded"))
    with pytest.raises(RequestError, match=message) as caught:
        limited.encode(fits + "x")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="max_model_len") as caught:
        limited.apply_chat_template([*chat, {"role": "user", "content": fits}])
    assert caught.value.param == "messages"
