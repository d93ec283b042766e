"""Samples by a remote vLLM (``vllm serve``): tokens in, tokens out; the weights are sent before
every rollout."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from typing import Any

import httpx
import torch
from torch import nn

from mmrl.core.errors import UserError
from mmrl.policies.vlm.engines import vllm_weights
from mmrl.policies.vlm.engines.external import EngineAnswer, EnginePrompt
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.engines.vllm_options import Setup, check_version, sampling
from mmrl.policies.vlm.engines.vllm_transfer import transfer_for
from mmrl.policies.vlm.engines.vllm_worker import EXTENSION, METHOD
from mmrl.policies.vlm.generate import Ending
from mmrl.policies.vlm.media import Video
from samplers.warp import Warp

KEY = "VLLM_API_KEY"  # environment variable with the key, as the server has it
ATTEMPTS = 3  # connection attempts of a request; an accepted one is not repeated
GENERATE = "/inference/v1/generate"  # the tokens-in, tokens-out route
Json = dict[str, Any]


class Server:
    """Talks to a vLLM by JSON. Every failure is a UserError that names the server."""

    def __init__(self, setup: Setup):
        options = setup.options
        self.url = options.server_base_url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY)
        try:
            self.client = httpx.Client(
                base_url=self.url,
                timeout=options.server_timeout,
                transport=httpx.HTTPTransport(
                    retries=ATTEMPTS, limits=httpx.Limits(max_connections=options.concurrency)
                ),
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
        except httpx.InvalidURL as error:
            raise self.mistake(f"it is no address: {error}") from error

    def mistake(self, what: str) -> UserError:
        """Word an error of the server."""
        return UserError(f"policy option vllm.server_base_url = {self.url}: {what}")

    def get(self, path: str) -> Any:
        """Return the response to GET."""
        return self._asked("GET", path).json()

    def post(self, path: str, body: Json | None = None) -> httpx.Response:
        """Return the response to POST. UserError where the server rejects it."""
        return self._asked("POST", path, body)

    def has(self, path: str) -> bool:
        """Tell whether the server has a route that takes POST."""
        return self._request("GET", path).status_code == httpx.codes.METHOD_NOT_ALLOWED

    def refuses(self, path: str) -> bool:
        """Tell by an empty request whether the server has disabled a POST route."""
        return self._request("POST", path, {}).status_code in (
            httpx.codes.FORBIDDEN,
            httpx.codes.NOT_FOUND,
        )

    def _asked(self, method: str, path: str, body: Json | None = None) -> httpx.Response:
        response = self._request(method, path, body)
        if response.is_error:
            raise self.mistake(f"{path} answers {response.status_code}: {_words(response)}")
        return response

    def _request(self, method: str, path: str, body: Json | None = None) -> httpx.Response:
        try:
            return self.client.request(method, path, json=body)
        except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
            raise self.mistake(
                f"no vLLM answers there ({type(error).__name__}: {error}); start one, as "
                "docs/vlm.md says, or name the right address"
            ) from error


class VLLMServer:
    """Samples by ``vllm serve``: token ids are sent, so no chat template intervenes, and the ids
    that the server read are compared with the policy's."""

    def __init__(self, setup: Setup):
        """Check the server. Raises UserError where it cannot be used: absent, too old, or started
        without options that sampling or weight transfer needs."""
        setup.check()
        self.setup = setup
        self.server = Server(setup)
        self.lora = setup.options.sync == "lora"
        self.packs = self.repacks = False  # a tied head: is it packed there, and repacked?
        self.notes = tuple(self._checked())
        self.transfer = transfer_for(self.server, setup)
        model = self._first()
        self.model = str(model["id"])
        longest = model.get("max_model_len")
        self.limits = EngineLimits(self.server.url, longest, tokens_option="--max-model-len there")

    def suits(self, hf: nn.Module) -> None:
        if self.lora:
            vllm_weights.check_adapters(hf)
        if self.packs and not self.repacks and vllm_weights.has_tied_head(hf):
            raise self.server.mistake(
                "it runs on a CPU, where vLLM keeps the old weights in a head that is tied to the "
                f"embeddings, as this model's is; start it with --worker-extension-cls {EXTENSION}"
            )

    @torch.no_grad()
    def refresh(self, hf: nn.Module) -> None:
        vllm_weights.check_whole(hf, "vllm-server")
        self.model = self.transfer.send(hf) or self.model
        if self.repacks:
            self.server.post("/collective_rpc", {"method": METHOD})
        for cache in ("prefix", "mm", "encoder"):  # results of the previous weights
            self.server.post(f"/reset_{cache}_cache")

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        with ThreadPoolExecutor(self.setup.options.concurrency) as threads:
            media = list(threads.map(self._media, _once(prompts)))
            by_prompt = dict(zip(map(id, _once(prompts)), media, strict=True))
            requests = [
                _request(prompt, by_prompt[id(prompt)], sampling(warp, ending, seed), self.model)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            answers = threads.map(partial(self.server.post, GENERATE), requests)
            return [
                self._read(prompt, response.json())
                for prompt, response in zip(prompts, answers, strict=True)
            ]

    def _checked(self) -> Iterator[str]:
        """Check how the server was started, and yield lines for the log."""
        check_version(str(self.server.get("/version").get("version")), self.server.url)
        if not self.server.has("/collective_rpc"):
            raise self.server.mistake(
                "it lacks the routes for weights; start it with VLLM_SERVER_DEV_MODE=1, in a "
                "network that only you reach"
            )
        if self.server.refuses(GENERATE):
            raise self.server.mistake(
                "it takes no tokens, only texts; start it with --enable-scale-out"
            )
        settings = self.server.get("/server_info?config_format=json")["vllm_config"]
        mode = settings["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise self.server.mistake(
                f"its log-probs are {mode}, and those of the distribution that it draws from are "
                "needed; start it with --logprobs-mode processed_logprobs"
            )
        if self.lora and not self.server.has("/v1/load_lora_adapter"):
            raise self.server.mistake(
                "it takes no adapters, which policy option vllm.sync = lora needs; start it with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank "
                f"{self.setup.room}"
            )
        self.packs = settings["device_config"]["device"] == "cpu"
        self.repacks = settings["parallel_config"]["worker_extension_cls"] == EXTENSION
        dtype = settings["model_config"]["dtype"].removeprefix("torch.")
        if self.setup.dtype not in (dtype, "auto"):
            yield (
                f"{self.server.url} holds its weights in {dtype} and the policy in "
                f"{self.setup.dtype}: engine/gap will be that of {dtype}, unless it is started "
                f"with --dtype {self.setup.dtype}"
            )

    def _first(self) -> Json:
        """Return the server's description of its base model."""
        models = self.server.get("/v1/models")["data"]
        return next(model for model in models if not model.get("parent"))

    def _media(self, prompt: EnginePrompt) -> Json:
        """Return the part of a request that carries the images and videos of a prompt."""
        if prompt.videos:
            return {"features": self._features(prompt)}
        if prompt.images:
            urls = [{"type": "image_url", "url": _png_url(image)} for image in prompt.images]
            return {"content_parts": urls}
        return {}

    def _features(self, prompt: EnginePrompt) -> Json:
        """Return the features of a prompt with videos, as the server's own processor makes them:
        only its chat route takes frame times. Their positions are found in the policy's tokens."""
        video = prompt.videos[0]
        content = [
            {"type": "video_url", "video_url": {"url": _frames_url(v)}} for v in prompt.videos
        ]
        content += [{"type": "image_url", "image_url": {"url": _png_url(i)}} for i in prompt.images]
        rendered = self.server.post(
            "/v1/chat/completions/render",
            {
                "model": str(self._first()["id"]),
                "messages": [{"role": "user", "content": content}],
                "media_io_kwargs": {"video": _times(video)},
            },
        ).json()
        features: Json = rendered["features"]
        features["mm_placeholders"] = {
            kind: _placed(prompt, rendered["token_ids"], ranges)
            for kind, ranges in features["mm_placeholders"].items()
        }
        return features

    def _read(self, prompt: EnginePrompt, answer: Json) -> EngineAnswer:
        prompt.check("vllm-server", answer["prompt_token_ids"])
        (choice,) = answer["choices"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return EngineAnswer(choice["token_ids"], logprobs)


def _request(prompt: EnginePrompt, media: Json, sampling_params: Json, model: str) -> Json:
    """Build a request of GENERATE. With features the tokens are those with all
    placeholders, else the server's processor puts them there."""
    return {
        "model": model,
        "token_ids": prompt.read if "features" in media else prompt.ids,
        "sampling_params": sampling_params,
        "return_token_ids": True,
        **media,
    }


def _once(prompts: Sequence[EnginePrompt]) -> list[EnginePrompt]:
    """Return each prompt once, in order; the copies of a group are the same object."""
    return list({id(prompt): prompt for prompt in prompts}.values())


def _placed(prompt: EnginePrompt, rendered: list[int], ranges: list[Json]) -> list[Json]:
    """Find in the prompt's tokens the placeholders [offset, length] of the server's own rendering,
    in order."""
    start = 0
    placed = []
    for each in ranges:
        tokens = rendered[each["offset"] : each["offset"] + each["length"]]
        last = len(prompt.read) - len(tokens)
        offsets = range(start, last + 1)
        at = next((i for i in offsets if prompt.read[i : i + len(tokens)] == tokens), None)
        if at is None:
            prompt.check("vllm-server", rendered)  # raises: they differ
            raise UserError(f"{prompt.name}: vLLM puts its features where the policy has none")
        placed.append({"offset": at, "length": len(tokens)})
        start = at + len(tokens)
    return placed


def _png(image: Any) -> str:
    with BytesIO() as buffer:
        image.save(buffer, "PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode()


def _png_url(image: Any) -> str:
    return f"data:image/png;base64,{_png(image)}"


def _frames_url(video: Video) -> str:
    """Encode frames as the list that vLLM takes. It calls them JPEG, but reads any format: these
    are PNG, so that no pixel changes."""
    from PIL import Image

    return "data:video/jpeg;base64," + ",".join(_png(Image.fromarray(f)) for f in video.frames)


def _times(video: Video) -> Json:
    """Return the times of a video's frames, in vLLM's format."""
    return {
        "num_frames": -1,
        "fps": video.fps,
        "frames_indices": list(video.indices),
        "total_num_frames": video.total,
        "duration": video.duration,
        "do_sample_frames": False,
    }


def _words(response: httpx.Response) -> str:
    """Return the message of an error response, without the JSON around it."""
    try:
        body = response.json()
        text = body.get("error", body) if isinstance(body, dict) else body
        text = text.get("message", text) if isinstance(text, dict) else text
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:500]
