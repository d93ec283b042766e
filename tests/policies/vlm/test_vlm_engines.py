"""Sampling engines, as far as no vLLM is needed: what any must do, and the message if one cannot be
used. The real vLLM: test_vllm_local.py, test_vllm_server.py."""

import importlib.metadata
import importlib.util
import socket
import warnings

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.base import turn_on_checkpointing
from mmrl.policies.lora import save_adapter
from mmrl.policies.vlm.engines import vllm_local, vllm_options, vllm_weights
from mmrl.policies.vlm.engines.external import EngineAnswer
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.engines.vllm_options import VLLMOptions
from mmrl.policies.vlm.parts import Parts
from tests.policies.vlm.test_vlm_policy import policy_of, quiet, rolled  # noqa: F401


class OwnModel:
    """An engine that samples texts by the policy's own model, one token after another."""

    notes = ()
    limits = EngineLimits("the engine", images=0, videos=0)

    def suits(self, hf):
        pass

    def refresh(self, hf):
        self.hf = hf

    @torch.no_grad()
    def answer(self, prompts, seeds, warp, ending):
        return [self.write(*each, warp, ending) for each in zip(prompts, seeds, strict=True)]

    def write(self, prompt, seed, warp, ending):
        generator = torch.Generator().manual_seed(seed)
        ids, logprobs = [], []
        while len(ids) < ending.tokens and not set(ids) & set(ending.stops):
            logits = self.hf(input_ids=torch.tensor([prompt.ids + ids])).logits[:, -1]
            logp = warp(logits).log_softmax(-1)[0]
            ids.append(int(logp.exp().multinomial(1, generator=generator)))
            logprobs.append(float(logp[ids[-1]]))
        return EngineAnswer(ids, logprobs)


@pytest.fixture
def engine(monkeypatch):
    """Samples instead of a vLLM server."""
    monkeypatch.setattr("mmrl.policies.vlm.policy.started", lambda *_: OwnModel())
    return {"engine": "vllm-server"}


def test_what_an_engine_says_of_its_tokens_is_what_the_policy_says(engine):
    policy = policy_of(**engine, temperature=0.8, top_k=20, stop=["e"])
    assert any("engine/gap" in note for note in policy.report.notes)
    texts = [{"text": "hello"}, {"text": "tell me a longer story about it"}]
    rollout = rolled(policy, texts)
    gap = (rollout.provenance.sampler_logprob - rollout.logprob)[rollout.mask].abs()
    measures = policy.measures()
    assert rollout.mask.any(1).all() and gap.max() < 1e-4 and measures["engine/gap"] < 1e-4
    assert 0 <= measures["time/sync_share"] < 1
    assert all("e" not in text[:-1] for text in policy.decode(rollout))
    assert len({tuple(row) for row in rollout.sample.tolist()}) > 2
    with pytest.raises(UserError, match="takes no images"):
        rolled(policy)


def test_an_engine_does_not_say_how_sure_the_model_was(engine):
    with pytest.raises(UserError, match="certainty"):
        rolled(policy_of(**engine, record_self_certainty=True), [{"text": "hello"}])


@pytest.fixture
def no_model(monkeypatch):
    """Whatever is refused is refused before the model is loaded."""
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)


@pytest.mark.usefixtures("no_model")
def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_local, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install vllm.*scripts/vllm_env"):
        policy_of(engine="vllm")


@pytest.mark.usefixtures("no_model")
def test_a_vllm_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(vllm_local, "find_spec", importlib.util.find_spec)
    monkeypatch.setattr(vllm_local, "PACKAGES", ("no-such-package", "torch"))
    monkeypatch.setattr(vllm_local, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm_local, "version", _version)
    with pytest.raises(UserError, match=r'is vLLM 0\.11\.2, .*pip install "vllm>=0\.32"'):
        policy_of(engine="vllm")


def _version(name):
    if name == "no-such-package":
        raise importlib.metadata.PackageNotFoundError(name)
    return "0.11.2"


@pytest.mark.parametrize("text", ["0.32.0", "0.33.1rc1", "1.0", "dev"])
def test_a_newer_vllm_is_taken(text):
    vllm_options.check_version(text, "it")


@pytest.mark.usefixtures("no_model")
def test_no_server_is_one_sentence():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=f"server_base_url = {url}: no vLLM answers there"):
        policy_of(engine="vllm-server", vllm=VLLMOptions(server_base_url=url))
    with pytest.raises(UserError, match="server_base_url"):
        policy_of(engine="vllm-server", vllm=VLLMOptions(server_base_url="nonsense"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("lora", "words"), [(None, "policy option lora sets none"), (600, "rank 512 at most")]
)
def test_adapters_that_cannot_travel_alone(monkeypatch, lora, words):
    monkeypatch.setattr(vllm_local, "check_installed", lambda: None)
    with pytest.raises(UserError, match=words):
        policy_of(engine="vllm", lora=lora, vllm=VLLMOptions(sync="lora"))


def test_only_adapters_of_the_language_model_travel_alone():
    vllm_weights.check_adapters(policy_of(lora=2).net.hf)
    with pytest.raises(UserError, match="visual.* is trained too"):
        vllm_weights.check_adapters(policy_of(train=Parts("lora", "frozen", "full")).net.hf)


def test_what_is_sent_has_the_names_and_values_of_a_saved_checkpoint(tmp_path):
    from safetensors.torch import load_file

    policy = policy_of(lora=2)
    with torch.no_grad():
        for p in policy.net.parameters():
            if p.requires_grad:
                p.normal_(generator=torch.Generator().manual_seed(0))
    vllm_weights.save_weights(policy.net.hf, tmp_path / "sent")
    sent = load_file(tmp_path / "sent" / vllm_weights.WEIGHTS)
    base = load_file(f"{policy.place}/model.safetensors")
    assert sent.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], sent[name])}
    assert changed and all("proj" in name and "visual" not in name for name in changed)


def test_an_adapter_is_saved_as_peft_loads_it(tmp_path):
    import json

    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    policy = policy_of(lora=2)
    with torch.no_grad():
        for p in policy.net.parameters():
            if p.requires_grad:
                p.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(policy.net.hf, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    base = AutoModelForImageTextToText.from_pretrained(policy.place)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    whole = vllm_weights.checkpoint_weights(policy.net.hf)
    for name, value in vllm_weights.checkpoint_weights(loaded).items():
        torch.testing.assert_close(value, whole[name], atol=1e-6, rtol=1e-6)


def test_transformers_and_peft_need_not_be_of_one_day(tmp_path, monkeypatch):
    """transformers refuses a peft older than the one it was written beside, which may be none that
    there is; adapters are added and saved by peft itself."""
    from transformers.integrations import peft as integration

    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "99.0")
    policy = policy_of(lora=2)
    with pytest.raises(ValueError, match="99.0"):
        policy.net.hf.active_adapters()
    policy.export(tmp_path / "export")
    assert {path.name for path in (tmp_path / "export").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_nothing_is_called_by_a_name_that_transformers_gives_up():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        policy = policy_of()
        policy.enable_gradient_checkpointing()
        rollout = rolled(policy)
        (point,) = policy.path(rollout)
        policy.dist(point).log_prob(point.target).sum().backward()
        assert turn_on_checkpointing(policy.net.hf)


def test_an_engine_is_not_asked_what_it_does_not_take(engine):
    policy = policy_of(**engine)
    policy.outside.limits = EngineLimits("the engine", 20, tokens_option="max_model_len")
    with pytest.raises(UserError, match="'word word.*more than the 20 that the engine takes"):
        rolled(policy, [{"text": "word " * 30}])
