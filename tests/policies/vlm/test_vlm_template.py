"""Prompts are written by the template that belongs to the model, with the variables that are asked
for; a thought that it opens is part of the answer."""

import shutil

import pytest

from mmrl.core.errors import UserError
from mmrl.policies.vlm.policy import VLM
from samplers.noise import Rng
from tests.fixtures import tiny_vlms

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
THINKS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% for p in m.content -%}{{ p.text or '<|image_pad|>' }}{%- endfor %}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{%- endif -%}"""
TEXTS_ONLY = (
    "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
)


@pytest.fixture
def model(tmp_path):
    """A family's folder, and a function that puts a template in it, of the processor or of the
    tokenizer."""
    place = tmp_path / "model"
    shutil.copytree(tiny_vlms.folder("qwen2_5_vl"), place)
    (place / "chat_template.jinja").unlink()

    def of(template="", tokenizer="", **options) -> VLM:
        from transformers import AutoTokenizer

        if template:
            (place / "chat_template.jinja").write_text(template)
        vlm = VLM(str(place), max_new_tokens=3)
        if tokenizer:
            tok = AutoTokenizer.from_pretrained(place)
            tok.chat_template = tokenizer
            tok.save_pretrained(place, save_jinja_files=False)
        return VLM(str(place), max_new_tokens=3, **options) if tokenizer or options else vlm

    return of


def text_of(vlm: VLM, row: dict) -> str:
    return vlm.inputs.tokenizer.decode(vlm.inputs.encode(row)["input_ids"][0])


def test_a_tokenizers_template_writes_the_roles(model):
    vlm = model(tokenizer=THINKS)
    text = text_of(vlm, {"messages": TURNS, "system": "brief"})
    assert [line.partition(">")[2] for line in text.split("<|im_end|>\n")[0].splitlines()][0] == (
        "system"
    )
    assert text.count("assistant") == 2 and text.endswith("<think>\n")


def test_a_template_of_texts_gets_texts_with_marks(model):
    vlm = model(tokenizer=TEXTS_ONLY)
    text = text_of(vlm, {"text": "see <image> now", "images": [tiny_vlms.image(56, 56)]})
    assert text.replace("<|image_pad|>", "") == "[user]see  now[assistant]"
    assert "<|image_pad|>" in text


def test_without_a_template_roles_are_refused_and_a_question_is_its_text(model):
    vlm = model()
    assert text_of(vlm, {"text": "why?"}) == "why?"
    with pytest.raises(UserError, match="d.jsonl:4: qwen2_5_vl has no chat template.*system, user"):
        vlm.inputs.encode({"text": "why?", "system": "brief", "origin": "d.jsonl:4"})
    with pytest.raises(UserError, match="user, assistant, user cannot be written"):
        vlm.inputs.encode({"messages": TURNS})


def test_variables_of_the_template_are_the_policys_or_a_rows(model):
    vlm = model(THINKS, chat_template_kwargs={"enable_thinking": False})
    closed = "<think>\n\n</think>\n\n"
    assert text_of(vlm, {"text": "why?"}).endswith(closed)
    for given in ({"enable_thinking": True, "tools": None}, '{"enable_thinking": true}'):
        row = {"text": "why?", "chat_template_kwargs": given}
        assert text_of(vlm, row).endswith("<think>\n")
        assert vlm.inputs.take(row)[1]["begun"] == "<think>\n"
    with pytest.raises(UserError, match="chat_template_kwargs.enable_thinkng.*no such variable"):
        model(THINKS, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(UserError, match="d.jsonl:2: chat_template_kwargs is list"):
        vlm.inputs.encode({"text": "?", "chat_template_kwargs": [1], "origin": "d.jsonl:2"})


def test_an_answer_begins_with_the_thought_that_its_prompt_opened(model):
    vlm = model(THINKS)
    asked = [{"text": "why?"}, {"text": "why?", "prefill": "<think>\nwell, "}]
    rollout = vlm.rollout(asked, 1, Rng.of("x"))
    first, second = vlm.decode(rollout)
    assert str(first).startswith("<think>\n")
    # an answer that is gone on with has the mark already
    assert str(second).startswith("<think>\nwell, ")
    assert text_of(vlm, asked[1]).endswith("assistant\n<think>\nwell, ")


def test_a_written_answer_stands_behind_the_opened_mark(model):
    vlm = model(THINKS)
    vlm.ending = vlm.ending.__class__(**{**vars(vlm.ending), "tokens": 40})
    rollout = vlm.demonstrate([{"text": "why?"}], ["<think>so</think>7"], Rng.of("x"), score=False)
    ids = rollout.sample[0, rollout.mask[0]].tolist()
    assert vlm.inputs.tokenizer.decode(ids[:-1]) == "so</think>7"
    assert str(vlm.decode(rollout)[0]).startswith("<think>\nso</think>7")
    with pytest.raises(UserError, match="opens a thought .<think>., in which .* '7' would stand"):
        vlm.demonstrate([{"text": "why?"}], ["7"], Rng.of("x"), score=False)
