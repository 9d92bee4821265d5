"""Prompts: the ids of transformers without transformers, and answers read back without dropping a token."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from coordinator import seed
from coordinator.tasks.prompts import PromptCodec, PromptError, eos_token_ids

CODEC = PromptCodec(seed.model_dir())
REFERENCE = PreTrainedTokenizerFast.from_pretrained(seed.model_dir())
EOS = (2,)
CHAT = [
    ("system", "Answer in one word."),
    ("user", "Spell it: planet"),
    ("assistant", "tenalp"),
    ("user", "Now süß"),
]

TEMPLATES = {
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "trimmed blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n{% endif %}\n{{ m }}{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "namespace": "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "absent": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ sep_token is defined }}",
    "dict": "{{ dict(a=1).a }}{{ range(3) | list }}",
}


def hf(tokenizer: PreTrainedTokenizerFast, messages: list[tuple[str, str]]) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the seed model's directory, without its weights."""
    copy = tmp_path / "model"
    shutil.copytree(seed.model_dir(), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def edit(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    content.update(values)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_conversation_equals_transformers() -> None:
    assert CODEC.encode(CHAT) == hf(REFERENCE, CHAT)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text()), min_size=1, max_size=4))
def test_any_conversation_equals_transformers(messages: list[tuple[str, str]]) -> None:
    assert CODEC.encode(messages) == hf(REFERENCE, messages)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("where", ["file", "entry", "named"])
def test_templates_equal_transformers(model: Path, template: str, where: str) -> None:
    file = model / "chat_template.jinja"
    if where == "file":
        file.write_text(template)
    else:
        file.unlink()
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
        edit(model / "tokenizer_config.json", chat_template=template if where == "entry" else named)
    assert PromptCodec(model).encode(CHAT) == hf(PreTrainedTokenizerFast.from_pretrained(model), CHAT)


def test_truncation_and_padding_in_the_file_do_nothing(model: Path) -> None:
    edit(
        model / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
        },
    )  # fmt: skip
    assert PromptCodec(model).encode(CHAT) == CODEC.encode(CHAT)


def test_special_token_given_as_object(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ eos_token }}")
    edit(model / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "special": True})
    assert PromptCodec(model).encode(CHAT) == [2]


@pytest.mark.parametrize(
    ("remove", "named"),
    [(["tokenizer.json"], "tokenizer.json"), (["chat_template.jinja"], "tokenizer_config.json")],
)
def test_missing_file_is_named(model: Path, remove: list[str], named: str) -> None:
    for name in remove:
        (model / name).unlink()
    with pytest.raises(PromptError, match=named):
        PromptCodec(model)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_broken_file_is_named(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(PromptError, match=name):
        PromptCodec(model)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ strftime_now('%d') }}",
        "{{ cycler('a') }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_templates_stay_in_their_sandbox(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    codec = PromptCodec(model)
    with pytest.raises(PromptError, match="refuses"):
        codec.encode(CHAT)


def test_empty_conversation() -> None:
    with pytest.raises(PromptError, match="at least one"):
        CODEC.encode([])


@given(st.text())
def test_text_survives(text: str) -> None:
    """Any text, unless it spells the end-of-turn token itself."""
    tokens = [*CODEC.encode_text(text.replace("<|im_end|>", "")), 2, 5]
    assert CODEC.decode(tokens, EOS) == text.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], None),
        ([67, 68], None),
        ([2], ""),
        ([67, 2, 68, 2], "a"),
        ([67, 1, 68, 2], "a<|im_start|>b"),
        ([67, 0, 2], "a<|endoftext|>"),
        ([67, 300, 68, 2], "a\ufffdb"),
        ([67, -1, 2**40, 2], "a\ufffd\ufffd"),
    ],
)
def test_decode_drops_nothing(tokens: list[int], text: str | None) -> None:
    assert CODEC.encode_text("ab") == [67, 68]
    assert CODEC.decode(tokens, EOS) == text


def test_decode_stops_at_whichever_end_comes_first() -> None:
    assert CODEC.decode([67, 0, 68, 2], (2, 0)) == "a"


def test_eos_ids(model: Path) -> None:
    assert eos_token_ids(model) == EOS
    edit(model / "generation_config.json", eos_token_id=[2, 0, 2])
    assert eos_token_ids(model) == (2, 0)
    edit(model / "generation_config.json", eos_token_id=None)
    edit(model / "config.json", eos_token_id=1)
    assert eos_token_ids(model) == (1,)


@pytest.mark.parametrize("value", [[], "2", -1, [2, None], True, 2.0])
def test_eos_ids_that_are_none(model: Path, value: object) -> None:
    edit(model / "generation_config.json", eos_token_id=value)
    with pytest.raises(PromptError, match="generation_config.json"):
        eos_token_ids(model)


def test_no_eos_id_anywhere(model: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        (model / name).unlink()
    with pytest.raises(PromptError, match=r"neither generation_config.json nor config.json"):
        eos_token_ids(model)
