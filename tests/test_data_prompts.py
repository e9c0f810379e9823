"""Prompts: templates, system turns, suffixes, length limits."""

import string

import pytest

from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.data import Prompter
from cispo_jax.data.tokenizers import character_tokenizer

# What SmolLM2's template does: a system turn of its own if the messages start with none.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EXAMPLE = {"id": "e", "prompt": "What is 2 + 2?", "answer": "4"}
CHAT = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def prompter(chat_template=SMOLLM2, /, bos_token="", **settings):
    """One token a character."""
    tokenizer = character_tokenizer("".join(sorted({*string.printable, *str(EXAMPLE), "\u221a"})))
    tokenizer.chat_template, tokenizer.special_tokens = chat_template, {"bos_token": bos_token}
    return Prompter(DataSettings(**settings), tokenizer)


def test_chat_has_no_system_turn_unless_asked():
    assert prompter().text(EXAMPLE) == CHAT
    assert prompter(system_prompt="Be brief.").text(EXAMPLE) == "<|im_start|>system\nBe brief.<|im_end|>\n" + CHAT
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert prompter(system_prompt=default).text(EXAMPLE) == f"<|im_start|>system\n{default}<|im_end|>\n{CHAT}"
    assert len(prompter().encode(EXAMPLE)) == len(CHAT)


def test_only_a_leading_system_turn_is_cut():
    quoting = {**EXAMPLE, "prompt": "Explain <|im_start|>system\nthis<|im_end|>\n"}
    assert "Explain <|im_start|>system\nthis<|im_end|>\n" in prompter().text(quoting)
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    assert prompter(plain).text(EXAMPLE) == "[user] What is 2 + 2?\n[assistant]"
    without = SMOLLM2.replace("loop.first and", "false and")
    assert prompter(without).text(quoting).startswith("<|im_start|>user\nExplain <|im_start|>system\nthis")
    assert prompter("{{ bos_token }}" + SMOLLM2, bos_token="<s>").text(EXAMPLE) == "<s>" + CHAT


def test_template_kwargs_reach_the_template():
    template = SMOLLM2.removesuffix("{% endif %}") + "{% if not thinking %}<think>\n</think>\n{% endif %}{% endif %}"
    assert prompter(template, template_kwargs={"thinking": False}).text(EXAMPLE) == CHAT + "<think>\n</think>\n"
    assert prompter(template, template_kwargs={"thinking": True}).text(EXAMPLE) == CHAT


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("", "What is 2 + 2?"),
        ("Think.", "What is 2 + 2?\nThink."),
        (" Think.", "What is 2 + 2? Think."),
        ("\n\nThink.", "What is 2 + 2?\n\nThink."),
    ],
)
def test_suffix_and_raw(suffix, expected):
    assert prompter(template="raw", prompt_suffix=suffix).text(EXAMPLE) == expected
    assert f"user\n{expected}<|im_end|>" in prompter(prompt_suffix=suffix).text(EXAMPLE)


def test_own_jinja_file(tmp_path):
    file = tmp_path / "few_shot.jinja"
    file.write_text(
        "{% if style == 'qa' %}\nQ: 1 + 1\nA: 2\n{% endif %}\n"
        "Q: {{ prompt }} ({{ example.id }}) {{ messages[0].role }}\nA:\n"
    )
    made = prompter(None, template=str(file), prompt_suffix=" Now.", template_kwargs={"style": "qa"})
    assert made.text(EXAMPLE) == "Q: 1 + 1\nA: 2\nQ: What is 2 + 2? Now. (e) user\nA:"


def test_own_jinja_file_is_sandboxed_and_checked(tmp_path):
    file = tmp_path / "t.jinja"
    for source, message in {
        "{{ promt }}": r"t\.jinja uses none of prompt, messages, example.*; it uses: promt\.",
        "{{ prompt.__class__.__mro__ }}": r"t\.jinja, example 'e': .*unsafe",
        "{% if %}": r"t\.jinja, line 1: ",
    }.items():
        file.write_text(source)
        with pytest.raises(ConfigError, match=message):
            prompter(template=str(file)).text(EXAMPLE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "chta"}, r"config\.data\.template='chta' must be chat, raw or the path.*Did you mean .chat.\?"),
        ({"template": "no/such.jinja"}, r"there is no file .*no/such\.jinja"),
        ({"template": "raw", "system_prompt": "x"}, r"config\.data\.template=raw has no place for system_prompt"),
        ({"long_prompts": "cut"}, r"config\.data\.long_prompts='cut' is neither refuse nor filter"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        prompter(**settings)
    with pytest.raises(ConfigError, match=r"config\.data\.template=chat, but this tokenizer has no chat template"):
        prompter(None)


def test_long_prompts_are_refused_or_filtered_never_cut(caplog):
    """Limit 512, a prompt of 558 tokens after the template."""
    long = {"id": "long", "prompt": "x" * (558 - len(CHAT) + len(EXAMPLE["prompt"])), "answer": "1"}
    assert len(prompter().encode(long)) == 558
    examples = [EXAMPLE, long, {**EXAMPLE, "id": "f"}]
    message = (
        r"config\.data\.source: 1 of 3 prompts are longer than config\.data\.max_prompt_tokens=512 after templating; "
        r"the longest \('long'\) has 558"
    )
    with pytest.raises(ConfigError, match=message):
        prompter(max_prompt_tokens=512).check(examples)
    kept = prompter(max_prompt_tokens=512, long_prompts="filter").check(examples)
    assert [example["id"] for example in kept] == ["e", "f"]
    assert "1 of 3 prompts are longer" in caplog.text
    assert prompter(max_prompt_tokens=558).check(examples) is examples
    with pytest.raises(ConfigError, match="3 of 3 prompts"):
        prompter(max_prompt_tokens=5, long_prompts="filter").check(examples)
    with pytest.raises(ConfigError, match=r"config\.data\.eval_source: 1 of 1"):
        prompter(max_prompt_tokens=5).check([EXAMPLE], "config.data.eval_source")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="the prompt of example 'n' has no token"):
        prompter(template="raw").check([EXAMPLE, {"id": "n", "prompt": ""}])
