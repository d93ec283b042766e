"""Prompts of vision-language models as tensors: tiny models of every family, unlike prompts,
mistakes named."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.core.media.clips import Timeline
from mmrl.policies.vlm.budgets import admit
from mmrl.policies.vlm.families import FAMILIES, family_of, part_of
from mmrl.policies.vlm.media import Budgets, open_video, sampled
from mmrl.policies.vlm.processor import Inputs
from tests.fixtures import clips, tiny_vlms, tiny_vlms_2026
from tests.fixtures.mistakes import message

NAMES = list(tiny_vlms.BUILDERS)


@cache
def loaded(name: str):
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    net = hf.AutoModelForImageTextToText.from_pretrained(tiny_vlms.folder(name)).eval()
    return net, hf.AutoProcessor.from_pretrained(tiny_vlms.folder(name))


def inputs(name: str, budgets: Budgets | None = None, coords=None) -> Inputs:
    net, processor = loaded(name)
    return Inputs(
        processor,
        net.config,
        budgets or Budgets(),
        family_of(net.config, coords),
        net.generation_config,
    )


def video(name: str, seed: int = 0):
    return tiny_vlms.video(1 if name == "gemma4" else 5, seed=seed)


def mixed(name: str) -> list[dict]:
    """Unlike prompts: one image, none, several, a video, as far as the family takes them."""
    single = {"text": "what is this?", "images": [tiny_vlms.image(70, 60)]}
    if name in tiny_vlms.ONE_IMAGE:
        return [single, {"text": "and where?", "image": tiny_vlms.image(99, 44, 1)}]
    if name in tiny_vlms_2026.LONG:
        clips = [{"text": "when?", "video": video(name), "fps": 2.0}]
        return [single, {"text": "why?"}, *clips[: name in tiny_vlms_2026.VIDEO]]
    two = [tiny_vlms.image(50, 120, 1), tiny_vlms.image(200, 60, 2)]
    questions = [
        single,
        {"text": "why?"},
        {"text": "compare <image> and <image>, say", "images": two, "system": "be brief"},
    ]
    if name in tiny_vlms.VIDEO + tiny_vlms_2026.VIDEO:
        questions.append({"text": "when?", "video": video(name), "fps": 2.0})
    return questions


def test_prompts_of_equally_many_images_make_a_batch_for_mllama():
    net = loaded("mllama")[0]
    reader = inputs("mllama")
    prompts = [
        {"text": t, "images": [tiny_vlms.image(w, 60, w)]}
        for t, w in (("what?", 60), ("and a longer one", 150))
    ]
    encoded = [reader.encode(prompt) for prompt in prompts]
    assert reader.groups(encoded) == [[0, 1]]
    with torch.no_grad():
        together = net(**reader.collate(encoded)).logits[:, -1]
        for row, tensors in zip(together, encoded):
            assert (row - net(**tensors).logits[0, -1]).abs().max() < 2e-5
    assert "equally many images" in message(
        reader.collate, [encoded[0], reader.encode({"text": "none"})]
    )


def test_the_encoding_is_the_processors_own():
    for name in NAMES:
        encoded_alike(name)


def encoded_alike(name):
    reader = inputs(name)
    prompt = mixed(name)[0]
    encoded = reader.encode(prompt)
    if reader.processor.chat_template:
        content = [
            {"type": "image", "image": prompt["images"][0]},
            {"type": "text", "text": prompt["text"]},
        ]
        expected = reader.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        expected = reader.processor(
            text="<image>" + prompt["text"], images=prompt["images"][0], return_tensors="pt"
        )
    assert set(encoded) <= set(expected) and "pixel_values" in encoded
    for key in encoded:
        assert torch.equal(encoded[key], torch.as_tensor(expected[key])), key


def test_what_stands_for_images_cannot_be_sampled_and_what_ends_can():
    for name in NAMES:
        tokens_of(name)


def tokens_of(name):
    reader = inputs(name)
    encoded = reader.encode(mixed(name)[0])
    size = reader.config.get_text_config().vocab_size  # of the head: ids beyond are never sampled
    image = reader.placeholder("image")
    assert image in reader.suppressed or image >= size
    assert reader.stops and not set(reader.stops) & set(reader.suppressed)
    assert reader.placeholders(encoded) >= 1
    special = {
        reader.tokenizer.convert_tokens_to_ids(t) for t in reader.tokenizer.all_special_tokens
    }
    harmless = ("<|pad|>", "<|bos|>", "<|im_start|>", "<end_of_utterance>")
    allowed = {reader.tokenizer.convert_tokens_to_ids(t) for t in harmless}
    banned = {i for i in special - allowed - set(reader.stops) if i < size}
    assert banned <= set(reader.suppressed)
    letters = reader.tokenizer("any answer", add_special_tokens=False)["input_ids"]
    assert not set(letters) & set(reader.suppressed)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_type_ids_that_a_family_needs_are_never_missing_in_silence(name, monkeypatch):
    reader = inputs(name)
    needed = FAMILIES[name].needs[0]
    encoded = reader.encode({"text": "why?"})
    assert needed in encoded
    without = {key: value for key, value in encoded.items() if key != needed}
    assert f"without {needed}" in message(reader.collate, [encoded, without])
    original = reader._processed
    monkeypatch.setattr(
        reader,
        "_processed",
        lambda *a, **o: {k: v for k, v in original(*a, **o).items() if k != needed},
    )
    complaint = message(reader.encode, {"text": "why?", "origin": "d.jsonl:3"})
    assert complaint.startswith("d.jsonl:3: ") and needed in complaint


def test_views_tell_what_the_model_saw():
    reader = inputs("qwen2_5_vl")
    prompt = {
        "text": "<image> or <image>?",
        "images": [tiny_vlms.image(70, 60), tiny_vlms.image(200, 60)],
    }
    encoded, view = reader.take(prompt)
    assert view == reader.view(prompt, encoded)
    assert (
        view["coords"] == "resized"
        and view["sizes"] == [[70, 60], [200, 60]]
        and view["frames"] == 0
    )
    assert view["resized"] == [[56, 56], [168, 28]]  # multiples of 28 within 12 * 28 * 28 pixels
    grid = encoded["image_grid_thw"]
    assert [[int(w) * 14, int(h) * 14] for _, h, w in grid] == view["resized"]
    _, view = reader.take({"text": "when?", "video": tiny_vlms.video(12, 84, 56), "fps": 4.0})
    assert view["frames"] == 6 and view["duration"] == 3.0 and view["sizes"] == [[84, 56]]


def test_a_space_is_never_guessed():
    assert inputs("llava").family.coords is None and inputs("llava").family.unverified()
    grounding = {
        "text": "where?",
        "images": [tiny_vlms.image(70, 60)],
        "boxes": [[0, 0, 9, 9]],
        "origin": "g.jsonl:8",
    }
    complaint = message(inputs("llava").encode, grounding)
    assert complaint.startswith("g.jsonl:8: ") and "set the policy's coordinate_space" in complaint
    assert inputs("llava", coords="rel1").take(grounding)[1]["coords"] == "rel1"
    assert "means nothing for llava" in message(inputs, "llava", coords="resized")


def test_unknown_families_get_general_rules():
    import transformers as hf

    family = family_of(hf.AyaVisionConfig())
    assert not family.known and family.needs == () and len(family.unverified()) == 2
    assert family_of(hf.Qwen3VLMoeConfig()).known


@pytest.mark.parametrize(
    "prompt, said",
    [
        (
            {"text": "<image> and <image>", "images": 1},
            "more <image> placeholders than the prompt has",
        ),
        ({"text": "<image>, only", "images": 2}, "1 <image> placeholders for 2 images"),
        ({"text": "the token <|image_pad|>", "images": 1}, "cannot encode"),
        ({"text": "the token <|image_pad|>"}, "cannot encode"),
        ({"images": 1}, "needs text"),
        (
            {"text": "what?", "images": ["/nowhere/gone.png"]},
            "cannot read the image '/nowhere/gone.png'",
        ),
        (
            {"text": "when?", "video": np.zeros((4, 8, 8), np.uint8), "fps": 2.0},
            "a video is a file, pictures, or frames uint8",
        ),
        ({"text": "when?", "video": "/nowhere/gone.mp4"}, "cannot read the video"),
    ],
)
def test_mistakes_name_the_prompt_and_the_remedy(prompt, said):
    if isinstance(prompt.get("images"), int):
        prompt = prompt | {"images": [tiny_vlms.image(60, 60, i) for i in range(prompt["images"])]}
    shown = message(inputs("qwen2_5_vl").encode, prompt | {"origin": "data.jsonl:17"})
    assert shown.startswith("data.jsonl:17: ") and said in shown


def test_conversations_with_parts_keep_their_order():
    reader = inputs("qwen2_5_vl")
    a = tiny_vlms.image(56, 56, 1)
    b = tiny_vlms.image(56, 56, 2)
    parts = [{"type": "text", "text": "first"}, {"type": "image"}, {"type": "image", "image": b}]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so?"},
    ]
    encoded = reader.encode({"messages": turns, "images": [a]})
    again = reader.encode(
        {"messages": [dict(turns[0], content="first<image><image>"), *turns[1:]], "images": [a, b]}
    )
    assert all(torch.equal(encoded[key], again[key]) for key in again)
    before = reader.encode({"messages": [{"role": "user", "content": "so?"}], "images": [a]})
    assert torch.equal(
        before["input_ids"], reader.encode({"text": "<image>so?", "images": [a]})["input_ids"]
    )


def test_pixels_are_limited_and_proportions_kept():
    prompt = {"text": "what?", "images": [tiny_vlms.image(112, 56)]}
    encoded, view = inputs("qwen2_5_vl", Budgets(max_pixels=3000)).take(prompt)
    assert view["sizes"] == [[112, 56]] and view["resized"] == [[84, 28]]
    assert len(encoded["pixel_values"]) < len(inputs("qwen2_5_vl").encode(prompt)["pixel_values"])


@pytest.mark.parametrize(
    "total, fps, budget, wanted",
    [
        (10, 10.0, Budgets(frames=32, fps=2.0), [0, 9]),
        (8, 2.0, Budgets(frames=32, fps=2.0), list(range(8))),
        (100, 25.0, Budgets(frames=4, fps=2.0), [0, 33, 66, 99]),
        (3, 30.0, Budgets(frames=32, fps=1.0), [1]),
        (5, 1.0, Budgets(frames=32, fps=4.0), list(range(5))),
    ],
)
def test_frames_are_taken_evenly_at_the_rate_asked_for(total, fps, budget, wanted):
    assert sampled(Timeline.steady(total, fps), budget) == wanted


def test_a_video_file_is_its_frames(tmp_path):
    import av

    path = tmp_path / "v.mp4"
    frames = tiny_vlms.video(1, 64, 48, seed=3).repeat(12, 0) // 12
    frames = (frames * np.arange(1, 13, dtype=np.uint8)[:, None, None, None]).astype(np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    reader = inputs("qwen3_vl", Budgets(frames=4))
    encoded, view = reader.take({"text": "when?", "video": str(path)})
    assert view["frames"] == 4 and view["duration"] == 3.0 and view["sizes"] == [[64, 48]]
    same = reader.encode({"text": "when?", "video": frames, "fps": 4.0})
    assert torch.equal(encoded["input_ids"], same["input_ids"])  # timestamps included
    # but for compression
    assert (encoded["pixel_values_videos"] - same["pixel_values_videos"]).abs().mean() < 0.3


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
    "model.language_model.layers.0.mlp.up_proj.weight": "language",
    "lm_head.weight": "language",
    "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": "vision",
    "model.multi_modal_projector.linear_1.weight": "projector",
    "model.image_newline": "projector",
    "model.connector.modality_projection.proj.weight": "projector",
    "model.text_model.layers.0.self_attn.q_proj.weight": "language",
    "model.vqmodel.encoder.conv_in.weight": "vision",
}


def test_parameters_have_their_part():
    assert {name: part_of(name) for name in PART_OF} == PART_OF


def test_every_family_has_all_three_parts():
    for name in NAMES:
        parts = {part_of(key) for key, _ in loaded(name)[0].named_parameters()}
        assert parts == {"language", "projector", "vision"}, name


# --------------------------------------------------------------------------------------------------
# budgets


def rows(sizes) -> list[dict]:
    return [
        {"text": "what?" + "x" * words, "images": [tiny_vlms.image(w, h)], "origin": f"d.jsonl:{i}"}
        for i, (w, h, words) in enumerate(sizes, 1)
    ]


@pytest.mark.parametrize("limit", [3, 9])
def test_images_are_scaled_down_until_their_tokens_fit(limit):
    reader = inputs("qwen2_5_vl", Budgets(image_tokens=limit))
    for prompt in rows([(300, 80, 0), (56, 56, 0), (90, 200, 0)]):
        cost, scale = reader.measure(prompt)
        free, _ = inputs("qwen2_5_vl").measure(prompt)
        assert cost.images <= limit and (scale == 1) == (free.images <= limit)
        assert cost.images >= min(free.images, limit) // 2  # not smaller than it must be
        _, view = reader.take(prompt)
        assert view["sizes"] == [list(prompt["images"][0].size)]


def test_long_prompts_are_left_out_and_named():
    reader = inputs("qwen2_5_vl", Budgets(prompt_tokens=40))
    admitted = admit(
        rows([(56, 56, 0), (56, 56, 60), (120, 120, 9)]), reader.budgets, reader.measure
    )
    assert [p["origin"] for p in admitted.prompts] == ["d.jsonl:1", "d.jsonl:3"]
    shrunk, dropped = admitted.notes
    assert shrunk == "budgets: 1 of 3 prompts have images that are scaled down: d.jsonl:3"
    assert dropped.startswith("budgets: 1 of 3 prompts are left out as too long: d.jsonl:2: ")
    assert "prompt tokens, more than budgets.prompt_tokens = 40" in dropped
    assert "d.jsonl:2: " in message(reader.encode, rows([(56, 56, 0), (56, 56, 60)])[1])


@pytest.mark.parametrize("overlong", ["drop", "error"])
def test_what_happens_to_an_overlong_prompt_is_said(overlong):
    reader = inputs("qwen2_5_vl", Budgets(image_tokens=4, overlong=overlong))
    prompts = rows([(56, 56, 0), (140, 56, 0)])
    if overlong == "error":
        complaint = message(admit, prompts, reader.budgets, reader.measure)
        assert complaint.startswith("1 of 2 rows are broken")
        assert "d.jsonl:2: 10 image tokens, more than budgets.image_tokens = 4\n" in complaint
    else:
        assert admit(prompts, reader.budgets, reader.measure).prompts == prompts[:1]


def test_a_processor_of_fixed_sizes_cannot_be_helped():
    reader = inputs("llava", Budgets(image_tokens=10))
    assert ("making its images smaller does not help") in message(
        reader.encode, rows([(200, 200, 0)])[0]
    )


def test_without_budgets_of_tokens_nothing_is_read():
    def measure(prompt):
        raise AssertionError

    prompts = rows([(56, 56, 0), (140, 56, 0)])
    assert admit(prompts, Budgets(), measure).prompts == prompts
    assert admit(prompts, Budgets(max_pixels=5000), measure).notes == (
        "budgets: 1 of 2 prompts have images that are scaled down: d.jsonl:2",
    )
