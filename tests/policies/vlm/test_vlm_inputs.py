"""Prompts of vision-language models as tensors: tiny models of every family, unlike prompts,
mistakes named."""

from __future__ import annotations

import re
import shutil
import wave
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from mmrl.core.errors import UserError
from mmrl.core.media.clips import Timeline
from mmrl.policies.vlm.audio import open_audio
from mmrl.policies.vlm.budgets import admit
from mmrl.policies.vlm.families import FAMILIES, family_of, part_of
from mmrl.policies.vlm.loading import auto_class
from mmrl.policies.vlm.media import Budgets, open_video, sampled
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.processor import Inputs
from samplers.noise import Rng
from tests.fixtures import clips, tiny_vlms
from tests.fixtures.mistakes import message
from tests.policies.vlm.test_vlm_policy import native

NAMES = tiny_vlms.FAMILIES


@cache
def loaded(name: str):
    import transformers as hf

    place = tiny_vlms.folder(name)
    return getattr(hf, auto_class(str(place))).from_pretrained(place).eval()


@cache
def processor(name: str):
    import transformers as hf

    hf.logging.set_verbosity_error()
    place = tiny_vlms.folder(name)
    parts = (hf.AutoProcessor, hf.AutoConfig, hf.GenerationConfig)
    return [part.from_pretrained(place) for part in parts]


def inputs(name: str, budgets: Budgets | None = None, coords=None) -> Inputs:
    tools, config, generation = processor(name)
    return Inputs(tools, config, budgets or Budgets(), family_of(config, coords), generation)


def mixed(name: str) -> list[dict]:
    """Unlike prompts: one image, none, several, a video, as far as the family takes them."""
    single = {"text": "what is this?", "images": [tiny_vlms.image(70, 60)]}
    if name in tiny_vlms.ONE_IMAGE:
        return [single, {"text": "and where?", "image": tiny_vlms.image(99, 44, 1)}]
    frames = tiny_vlms.video(1 if name == "gemma4" else 5)
    clip = [{"text": "when?", "video": frames, "fps": 2.0}] if name in tiny_vlms.VIDEO else []
    if name in tiny_vlms.LONG:
        return [single, {"text": "why?"}, *clip]
    two = [tiny_vlms.image(50, 120, 1), tiny_vlms.image(200, 60, 2)]
    pair = {"text": "compare <image> and <image>, say", "images": two, "system": "be brief"}
    return [single, {"text": "why?"}, pair, *clip]


def test_prompts_of_equally_many_images_make_a_batch_for_mllama():
    reader = inputs("mllama")
    pictures = [tiny_vlms.image(60, 60), tiny_vlms.image(150, 60)]
    encoded = [reader.encode({"text": "x" * n, "images": pictures[:n]}) for n in (1, 2, 1)]
    assert reader.groups(encoded) == [[0, 2], [1]]
    assert "equally many images" in message(reader.collate, encoded)


def test_the_encoding_is_the_processors_own(subtests):
    for name in NAMES[: NAMES.index("qwen3_5")]:
        with subtests.test(name):
            encoded_alike(name)


def encoded_alike(name):
    reader = inputs(name)
    prompt = mixed(name)[0]
    encoded = reader.encode(prompt)
    if reader.processor.chat_template:
        media = [{"type": "image", "image": prompt["images"][0]}]
        content = [*media, {"type": "text", "text": prompt["text"]}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        expected = reader.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, **options
        )
    else:
        expected = reader.processor(
            text="<image>" + prompt["text"], images=prompt["images"][0], return_tensors="pt"
        )
    assert set(encoded) <= set(expected)
    for key in encoded:
        assert torch.equal(encoded[key], torch.as_tensor(expected[key])), key
    image = reader.placeholder("image")
    beyond = image >= reader.config.get_text_config().vocab_size  # the head has no logit of it
    assert image in reader.suppressed or beyond
    assert reader.placeholders(encoded) >= 1 and reader.stops
    letters = reader.tokenizer("any answer", add_special_tokens=False)["input_ids"]
    assert not {*letters, *reader.stops} & set(reader.suppressed)


def test_type_ids_that_a_family_needs_are_never_missing_in_silence():
    reader = inputs("gemma3")
    needed = FAMILIES["gemma3"].needs[0]
    encoded = reader.encode({"text": "why?"})
    assert needed in encoded
    without = {key: value for key, value in encoded.items() if key != needed}
    assert f"without {needed}" in message(reader.collate, [encoded, without])


def test_views_tell_what_the_model_saw():
    pair = [tiny_vlms.image(70, 60), tiny_vlms.image(200, 60)]
    prompt = {"text": "<image> or <image>?", "images": pair}
    reader = inputs("qwen2_5_vl")
    encoded, view = reader.take(prompt)
    assert view == reader.view(prompt, encoded)
    assert view["coords"] == "resized" and view["frames"] == 0
    assert view["sizes"] == [[70, 60], [200, 60]]
    assert view["resized"] == [[56, 56], [168, 28]]  # multiples of 28 within 12 * 28 * 28 pixels
    grid = encoded["image_grid_thw"]
    assert [[int(w) * 14, int(h) * 14] for _, h, w in grid] == view["resized"]
    _, view = reader.take({"text": "when?", "video": tiny_vlms.video(12, 84, 56), "fps": 4.0})
    assert view["frames"] == 6 and view["duration"] == 3.0 and view["sizes"] == [[84, 56]]
    limited = inputs("qwen2_5_vl", Budgets(max_pixels=3000))
    _, view = limited.take({"text": "what?", "images": [tiny_vlms.image(112, 56)]})
    assert view["sizes"] == [[112, 56]] and view["resized"] == [[84, 28]]


def test_a_space_is_never_guessed():
    assert inputs("llava").family.coords is None and inputs("llava").family.unverified()
    grounding = {"text": "where?", "images": [tiny_vlms.image(70, 60)]}
    grounding |= {"boxes": [[0, 0, 9, 9]], "origin": "g.jsonl:8"}
    complaint = message(inputs("llava").encode, grounding)
    assert complaint.startswith("g.jsonl:8: ") and "set the policy's coordinate_space" in complaint
    assert inputs("llava", coords="rel1").take(grounding)[1]["coords"] == "rel1"
    assert "means nothing for llava" in message(inputs, "llava", coords="resized")


PICTURE = tiny_vlms.image(60, 60)
MISTAKES = [
    ({"text": "<image> and <image>", "image": PICTURE}, "more <image> placeholders than the prom"),
    ({"text": "<image>, only", "images": [PICTURE] * 2}, "1 <image> placeholders for 2 images"),
    ({"text": "the token <|image_pad|>", "image": PICTURE}, "cannot encode"),
    ({"text": "the token <|image_pad|>"}, "cannot encode"),
    ({"image": PICTURE}, "needs text"),
    ({"text": "what?", "images": ["/nowhere/gone.png"]}, "cannot read the image '/nowhere/gone"),
    ({"text": "?", "video": np.zeros((4, 8, 8), np.uint8), "fps": 2.0}, "a video is a file, pict"),
    ({"text": "when?", "video": "/nowhere/gone.mp4"}, "cannot read the video"),
]


def test_mistakes_name_the_prompt_and_the_remedy():
    for prompt, said in MISTAKES:
        shown = message(inputs("qwen2_5_vl").encode, prompt | {"origin": "data.jsonl:17"})
        assert shown.startswith("data.jsonl:17: ") and said in shown


def test_conversations_with_parts_keep_their_order():
    reader = inputs("qwen2_5_vl")
    a, b = (tiny_vlms.image(56, 56, seed) for seed in (1, 2))
    parts = [{"type": "text", "text": "first"}, {"type": "image"}, {"type": "image", "image": b}]
    later = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "so?"}]
    encoded = reader.encode(
        {"messages": [{"role": "user", "content": parts}, *later], "images": [a]}
    )
    marked = {"role": "user", "content": "first<image><image>"}
    again = reader.encode({"messages": [marked, *later], "images": [a, b]})
    assert all(torch.equal(encoded[key], again[key]) for key in again)
    before = reader.encode({"messages": [{"role": "user", "content": "so?"}], "images": [a]})
    wanted = reader.encode({"text": "<image>so?", "images": [a]})
    assert torch.equal(before["input_ids"], wanted["input_ids"])


def test_frames_are_taken_evenly_at_the_rate_asked_for():
    for total, fps, frames, rate, wanted in (
        (10, 10.0, 32, 2.0, [0, 9]),
        (8, 2.0, 32, 2.0, list(range(8))),
        (100, 25.0, 4, 2.0, [0, 33, 66, 99]),
        (3, 30.0, 32, 1.0, [1]),
        (5, 1.0, 32, 4.0, list(range(5))),
    ):
        assert sampled(Timeline.steady(total, fps), Budgets(frames=frames, fps=rate)) == wanted


def test_the_seconds_of_a_varying_rate_are_those_of_the_frames_shown(tmp_path):
    path = str(clips.write(tmp_path / "a.mkv", [3000 + stamp for stamp in clips.UNEVEN]))
    times = np.array(clips.UNEVEN) / 1000
    reader = inputs("video_llama_3", Budgets(frames=12, fps=1.0))
    video = open_video(path, None, reader.budgets, {"text": "when?"})
    numbers = clips.numbers_in(video.frames)
    moments = np.linspace(0, times[-1], 12) + 1e-6  # a picture stays until the next
    assert numbers == [int((times <= moment).sum()) - 1 for moment in moments]
    encoded, view = reader.take({"text": "when?", "video": path})
    told = re.findall(r"Time (\d+\.\d)s:", reader.tokenizer.decode(encoded["input_ids"][0]))
    assert told == [f"{times[number]:.1f}" for number in numbers]
    assert 12.05 <= view["duration"] <= 12.15


def test_clips_of_unlike_numbers_of_frames_are_told_apart_or_refused_with_the_remedy():
    row = {"text": "which?", "videos": [tiny_vlms.video(4), tiny_vlms.video(5)], "fps": 2.0}
    said = message(inputs("internvl").encode, row | {"origin": "d.jsonl:3"})
    assert "d.jsonl:3: " in said and "clips have 4 and 5 frames: budgets.frames: 4 gives" in said
    grids = inputs("qwen2_5_vl").encode(row)["video_grid_thw"]
    assert grids[:, 0].tolist() == [2, 3]
    assert inputs("internvl", Budgets(frames=4)).take(row)[1]["frames"] == 8


def test_frames_are_a_video_at_the_rate_of_their_row(tmp_path):
    reader = inputs("qwen3_vl")
    frames = tiny_vlms.video(4)
    files = [str(tmp_path / f"{i}.png") for i in range(4)]
    for frame, file in zip(frames, files):
        Image.fromarray(frame).save(file)
    wanted = reader.encode({"text": "when?", "video": frames, "fps": 1.0})
    part = {"type": "video", "video": files, "sample_fps": 1.0}
    turn = {"role": "user", "content": [part, {"type": "text", "text": "when?"}]}
    for row in (
        {"text": "when?", "video": files, "fps": 1},
        {"text": "when?", "videos": [files], "fps": [1.0]},
        {"messages": [turn]},
    ):
        encoded = reader.encode(row)
        assert all(torch.equal(encoded[key], wanted[key]) for key in wanted)
    two = {"text": "when?", "videos": [frames, files], "origin": "d.jsonl:3"}
    assert "d.jsonl:3: 1 fps for 2 videos" in message(reader.encode, two | {"fps": [1.0]})
    seconds = "<0.5 seconds>", "<2.5 seconds>"  # of pairs of frames at 1 a second
    text = reader.tokenizer.decode(wanted["input_ids"][0])
    assert all(second in text for second in seconds)
    for given in (frames, files, list(frames)):
        said = message(reader.encode, {"text": "when?", "video": given, "origin": "d.jsonl:3"})
        assert said.startswith("d.jsonl:3: cannot read the video: ") and "into the row: fps" in said


PART_OF = {
    "model.visual.blocks.0.attn.qkv.weight": "vision",
    "model.visual.merger.mlp.0.weight": "projector",
    "model.visual.deepstack_merger_list.0.norm.weight": "projector",
    "lm_head.weight": "language",
    "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": "vision",
    "model.image_newline": "projector",
    "model.connector.modality_projection.proj.weight": "projector",
    "model.text_model.layers.0.self_attn.q_proj.weight": "language",
    "model.vqmodel.encoder.conv_in.weight": "vision",
}


def test_parameters_have_their_part():
    assert {name: part_of(name) for name in PART_OF} == PART_OF
    for name in NAMES[: NAMES.index("qwen3_5")]:
        parts = {part_of(key) for key, _ in loaded(name).named_parameters()}
        assert parts == {"language", "projector", "vision"}, name


def rows(sizes) -> list[dict]:
    return [
        {"text": "what?" + "x" * words, "images": [tiny_vlms.image(w, h)], "origin": f"d.jsonl:{i}"}
        for i, (w, h, words) in enumerate(sizes, 1)
    ]


def test_images_are_scaled_down_until_their_tokens_fit():
    reader = inputs("qwen2_5_vl", Budgets(image_tokens=3))
    for prompt in rows([(300, 80, 0), (56, 28, 0), (90, 200, 0)]):
        cost, scale = reader.measure(prompt)
        free, _ = inputs("qwen2_5_vl").measure(prompt)
        assert cost.images <= 3 and (scale == 1) == (free.images <= 3)
        assert cost.images >= min(free.images, 3) // 2  # not smaller than it must be


def test_long_prompts_are_left_out_and_named():
    reader = inputs("qwen2_5_vl", Budgets(prompt_tokens=40))
    prompts = rows([(56, 56, 0), (56, 56, 60), (120, 120, 9)])
    admitted = admit(prompts, reader.budgets, reader.measure)
    assert [p["origin"] for p in admitted.prompts] == ["d.jsonl:1", "d.jsonl:3"]
    shrunk, dropped = admitted.notes
    assert shrunk == "budgets: 1 of 3 prompts have images that are scaled down: d.jsonl:3"
    assert dropped.startswith("budgets: 1 of 3 prompts are left out as too long: d.jsonl:2: ")
    assert "prompt tokens, more than budgets.prompt_tokens = 40" in dropped
    assert "d.jsonl:2: " in message(reader.encode, prompts[1])
    stops = inputs("qwen2_5_vl", Budgets(image_tokens=4, overlong="error"))
    large = rows([(56, 56, 0), (140, 56, 0)])
    complaint = message(admit, large, stops.budgets, stops.measure)
    assert complaint.startswith("1 of 2 rows are broken")
    assert "d.jsonl:2: 10 image tokens, more than budgets.image_tokens = 4\n" in complaint
    fixed = inputs("llava", Budgets(image_tokens=10))
    assert "making its images smaller does not help" in message(fixed.encode, large[1])


# --------------------------------------------------------------------------------------------------
# sounds: of Qwen3-Omni's thinker and Phi-4 multimodal

RATE = 16_000
KINDS = ("qwen3_omni_moe_thinker", "phi4_multimodal")


def sound(seconds, seed=0):
    noise = np.random.default_rng(seed).standard_normal(int(RATE * seconds))
    return (0.1 * noise).astype(np.float32)


def prompts():
    return [
        {"text": "what is it", "audio": sound(0.3)},
        {"text": "<audio> or <audio>", "audios": [sound(0.2, 1), sound(0.4, 2)]},
        {"text": "nothing"},
        {"text": "seen", "image": tiny_vlms.image(32, 32)},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_to_sounds_are_scored_as_the_model_itself_does(kind):
    """Rows of prompts with one sound, two of other lengths, none, and a picture, in one rollout;
    and each by the class of transformers alone."""
    vlm = VLM(str(tiny_vlms.folder(kind)), max_new_tokens=3, dtype="float32")
    with torch.no_grad():
        rollout = vlm.rollout(prompts(), 2, Rng.of("heard"))
    (point,) = vlm.path(rollout)
    logp = vlm.dist(point).log_prob(point.target)
    torch.testing.assert_close(logp[point.mask], point.logprob[point.mask], atol=1e-4, rtol=0)
    gap = (rollout.logprob - native(vlm, rollout))[rollout.mask].abs()
    assert gap.max() < 2e-4
    # another sound is another distribution
    other, _ = vlm.recall([{"text": "what is it", "audio": sound(0.3, 5)}, *prompts()[1:]])
    moved = vlm.dist(point.replace(cond=other)).log_prob(point.target) - logp
    assert moved[:2][point.mask[:2]].abs().max() > 1e-4


def test_files_are_decoded_at_the_model_s_rate(tmp_path):
    file = tmp_path / "tone.wav"
    tone = np.sin(np.arange(8000) / 8000 * 2 * np.pi * 440)
    with wave.open(str(file), "wb") as out:
        out.setparams((2, 2, 8000, 8000, "NONE", ""))
        out.writeframes((np.repeat(tone, 2) * 20000).astype("<i2").tobytes())
    opened = open_audio(str(file), RATE, {})
    assert abs(len(opened) - RATE) < 100 and opened.dtype == np.float32
    middle = opened[4000:12000]
    expected = np.sin(np.arange(4000, 12000) / RATE * 2 * np.pi * 440) * 20000 / 32768
    assert np.abs(middle - expected).max() < 0.02


def test_what_cannot_be_heard_is_one_sentence(tmp_path):
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"no sound")
    heard = inputs(KINDS[1])
    for prompt, says in (
        ({"audio": str(broken)}, "no sound can be decoded of .*broken.wav"),
        ({"audio": str(tmp_path / "none.wav")}, "no sound can be decoded"),
        ({"audio": {"array": sound(0.1), "sampling_rate": 8000}}, "has 8000 numbers a second"),
        ({"audio": np.zeros((2, 5))}, "must be one channel"),
        ({"text": "<audio> and <audio>", "audio": sound(0.1)}, "more <audio> placeholders"),
    ):
        with pytest.raises(UserError, match=says):
            heard.encode({"text": "what"} | prompt)
    deaf = inputs("qwen2_5_vl")
    with pytest.raises(UserError, match="qwen2_5_vl is given no audio here"):
        deaf.encode({"text": "what", "audio": sound(0.1)})
    with pytest.raises(UserError, match="use engine: own"):
        heard.engine_prompt(prompts()[0])


# --------------------------------------------------------------------------------------------------
# templates: a thought that one opens belongs to the answer

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
        if template:
            (place / "chat_template.jinja").write_text(template)
        if tokenizer:
            tok = AutoTokenizer.from_pretrained(place)
            tok.chat_template = tokenizer
            tok.save_pretrained(place, save_jinja_files=False)
        return VLM(str(place), **{"max_new_tokens": 3} | options)

    return of


def text_of(vlm: VLM, row: dict) -> str:
    return vlm.inputs.tokenizer.decode(vlm.inputs.encode(row)["input_ids"][0])


def test_a_tokenizers_template_writes_the_roles(model):
    text = text_of(model(tokenizer=THINKS), {"messages": TURNS, "system": "brief"})
    roles = [part.partition("\n")[0] for part in text.split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert text.endswith("<think>\n")


def test_a_template_of_texts_gets_texts_with_marks(model):
    row = {"text": "see <image> now", "images": [tiny_vlms.image(56, 56)]}
    text = text_of(model(tokenizer=TEXTS_ONLY), row)
    assert text.replace("<|image_pad|>", "") == "[user]see  now[assistant]" != text


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
    vlm = model(THINKS, max_new_tokens=40)
    asked = [{"text": "why?"}, {"text": "why?", "prefill": "<think>\nwell, "}]
    first, second = vlm.decode(vlm.rollout(asked, 1, Rng.of("x")))
    assert str(first).startswith("<think>\n")
    # an answer that is gone on with has the mark already
    assert str(second).startswith("<think>\nwell, ")
    assert text_of(vlm, asked[1]).endswith("assistant\n<think>\nwell, ")
    # a written answer stands behind the mark
    rollout = vlm.demonstrate(asked[:1], ["<think>so</think>7"], Rng.of("x"), score=False)
    ids = rollout.sample[0, rollout.mask[0]].tolist()
    assert vlm.inputs.tokenizer.decode(ids[:-1]) == "so</think>7"
    assert str(vlm.decode(rollout)[0]).startswith("<think>\nso</think>7")
    with pytest.raises(UserError, match="opens a thought .<think>., in which .* '7' would stand"):
        vlm.demonstrate(asked[:1], ["7"], Rng.of("x"), score=False)
