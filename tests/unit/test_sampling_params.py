"""SamplingParams refuses what cannot work, naming the parameter, its value and what is allowed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pilotfish.errors import PilotfishError, RequestError
from pilotfish.types import SamplingParams

BAD = [
    ("n", 0),
    ("n", 65),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("logit_bias", [1]),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("min_tokens", -1),
    ("min_tokens", 17),  # above max_tokens=16
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", b"a"),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", None),
    ("skip_special_tokens", "yes"),
    ("seed", 2**64),
    ("seed", 1.0),
    ("logprobs", -1),
    ("logprobs", 101),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert "must" in str(caught.value)
    assert isinstance(caught.value, (PilotfishError, ValueError))


@pytest.mark.parametrize("value", [100.5, -101, math.nan, "1"])
def test_bad_bias_values_name_their_token(value: object) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[7\]") as caught:
        SamplingParams(logit_bias={7: value})  # type: ignore[dict-item]
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("name", ["n", "max_tokens", "temperature", "seed"])
def test_long_values_are_cut_in_messages(name: str) -> None:
    for value in (-(10**400), -(10**5000)):  # Python does not write the second
        with pytest.raises(RequestError, match=rf"^{name}=") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 64),
        ("temperature", 0),
        ("top_p", 1),
        ("top_p", 1e-12),
        ("top_k", -1),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("logit_bias", {0: 100, 3: -100.0}),
        ("min_tokens", 16),
        ("max_tokens", None),
        ("stop", ("a", "b")),
        ("stop_token_ids", ()),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
    ],
)
def test_bounds_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


def test_stop_strings_are_a_tuple_in_any_form() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
