"""The page of model families: families are tried, and one that is not exact is found."""

from typing import Any

import pytest
import transformers

from exspec.actors.exactness import check_forward
from tests.tools import families
from tests.tools.families import Trial


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return dict(families.configurations())


WINDOWS = ["mistral", "gemma2", "gemma3_text"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "llama, dynamic NTK", "phi3, longrope", "granitemoe", *WINDOWS])
def test_a_family_that_works_works_in_both_dtypes(known: dict[str, Any], family: str) -> None:
    assert families.trial(family, known[family]) == Trial(family, "works")


@pytest.mark.parametrize("family", WINDOWS)
def test_the_check_leaves_the_window_as_it_was(known: dict[str, Any], family: str) -> None:
    model = families.build(known[family]())
    check_forward(model, family)
    assert model.config.sliding_window == 16


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bart", "an encoder-decoder model (bart)"),
        ("jamba", "the cache of jamba does not hold the keys and values of every token (linear_attention)"),
        ("moshi", "moshi decodes differently in slots than alone (its logits differ)"),
    ],
)
def test_a_refused_family_has_its_reason(known: dict[str, Any], family: str, reason: str) -> None:
    assert families.trial(family, known[family]) == Trial(family, "refused", reason)


def test_a_family_that_cannot_be_built_is_listed_and_not_counted() -> None:
    def fails() -> Any:
        raise KeyError("size")

    made = families.trial("odd", fails)
    assert made == Trial("odd", families.BUILD, "KeyError: 'size'")
    page = families.page([made, Trial("good", "works")])
    assert "1 of 2 work, 0 of them in float32 only." in page
    assert "- KeyError: `odd`" in page


def test_the_page_groups_families_by_reason() -> None:
    refused = {
        "bart": "an encoder-decoder model (bart)",
        "mbart": "an encoder-decoder model (mbart)",
        "llama4": "llama4_text does not decode (RuntimeError: size 4 (of 8))",
        "gptj": "gptj does not decode (RuntimeError: size 3)",
        "moshi": "moshi does not decode (its logits differ)",
        "jamba": "the cache of jamba does not hold every token (linear_attention)",
        "gemma4": "the layers of gemma4 have different shapes ('head_dim' is a per-layer attribute)",
    }
    page = families.page([Trial(family, "refused", reason) for family, reason in refused.items()])
    assert page.partition("## Rejected\n\n")[2].splitlines() == [
        "- an encoder-decoder model: `bart`, `mbart`",
        "- does not decode: (RuntimeError) `llama4`, `gptj`; (its logits differ) `moshi`",
        "- the cache does not hold every token: (linear_attention) `jamba`",
        "- the layers have different shapes: `gemma4`",
    ]


def test_a_model_that_gets_past_the_check_and_differs_is_found(
    known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself: without the check, a model whose cache forgets does not count as working."""
    monkeypatch.setattr(families, "check_forward", lambda *_: None)
    made = families.trial("moshi", known["moshi"])
    assert made.result == "differs"
    assert "completions are not those of generate" in made.reason


def test_the_page_has_every_family(known: dict[str, Any]) -> None:
    page = families.PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." not in page:
        pytest.skip("made with another version of transformers")
    assert [name for name in known if f"`{name}`" not in page] == []
