"""Sampling engines, as far as no vLLM is needed: test_vllm_local.py has the real one."""

import importlib.metadata
import socket
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mmrl.core.errors import UserError
from mmrl.policies.base import turn_on_checkpointing
from mmrl.policies.lora import save_adapter
from mmrl.policies.vlm.engines import vllm_local, vllm_options, vllm_weights
from mmrl.policies.vlm.engines.external import EngineAnswer
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.engines.vllm_options import VLLMOptions
from mmrl.policies.vlm.parts import Parts
from tests.policies.vlm.test_vlm_policy import logprobs, policy_of, rolled


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
    policy.outside.limits = EngineLimits("the engine", 20, tokens_option="max_model_len")
    with pytest.raises(UserError, match="'word word.*more than the 20 that the engine takes"):
        rolled(policy, [{"text": "word " * 30}])
    with pytest.raises(UserError, match="certainty"):
        rolled(policy_of(**engine, record_self_certainty=True), [{"text": "hello"}])


def _version(name):
    if name == "no-such-package":
        raise importlib.metadata.PackageNotFoundError(name)
    return "0.11.2"


def test_an_engine_that_is_not_there_is_one_sentence(monkeypatch):
    """Before the model is loaded."""
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)
    monkeypatch.setattr(vllm_local, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install vllm.*scripts/vllm_env"):
        policy_of(engine="vllm")
    monkeypatch.setattr(vllm_local, "PACKAGES", ("no-such-package", "torch"))
    monkeypatch.setattr(vllm_local, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm_local, "version", _version)
    with pytest.raises(UserError, match=r'is vLLM 0\.11\.2, .*pip install "vllm>=0\.32"'):
        policy_of(engine="vllm")
    for newer in ("0.32.0", "0.33.1rc1", "1.0", "dev"):
        vllm_options.check_version(newer, "it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for given, said in ((url, f"{url}: no vLLM answers there"), ("nonsense", "server_base_url")):
        with pytest.raises(UserError, match=said):
            policy_of(engine="vllm-server", vllm=VLLMOptions(server_base_url=given))


def test_only_adapters_of_the_language_model_travel_alone(monkeypatch):
    vllm_weights.check_adapters(policy_of(lora=2).net.hf)
    with pytest.raises(UserError, match="visual.* is trained too"):
        vllm_weights.check_adapters(policy_of(train=Parts("lora", "frozen", "full")).net.hf)
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)
    monkeypatch.setattr(vllm_local, "check_installed", lambda: None)
    for lora, words in ((None, "policy option lora sets none"), (600, "rank 512 at most")):
        with pytest.raises(UserError, match=words):
            policy_of(engine="vllm", lora=lora, vllm=VLLMOptions(sync="lora"))


def test_what_is_sent_is_a_checkpoint_and_an_adapter_what_peft_loads(tmp_path):
    policy = policy_of(lora=2)
    with torch.no_grad():
        for p in policy.net.parameters():
            if p.requires_grad:
                p.normal_(generator=torch.Generator().manual_seed(0))
    vllm_weights.save_weights(policy.net.hf, tmp_path / "sent")
    sent = load_file(tmp_path / "sent" / vllm_weights.WEIGHTS)
    before = load_file(f"{policy.place}/model.safetensors")
    assert sent.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], sent[name])}
    assert changed and all("proj" in name and "visual" not in name for name in changed)
    save_adapter(policy.net.hf, tmp_path / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(policy.place)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    for name, value in vllm_weights.checkpoint_weights(loaded).items():
        torch.testing.assert_close(value, sent[name], atol=1e-6, rtol=1e-6)


def test_nothing_is_called_by_a_name_that_transformers_gives_up():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        policy = policy_of()
        policy.enable_gradient_checkpointing()
        logprobs(policy, rolled(policy)).sum().backward()
        assert turn_on_checkpointing(policy.net.hf)
