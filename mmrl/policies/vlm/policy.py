"""Trains vision-language models: any image-text-to-text model of transformers, by its real
classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mmrl.core import pretrained
from mmrl.core.broken_rows import BrokenRows
from mmrl.core.effects import CHOOSES_WEIGHTS, FREE_AT_RESUME, Effects
from mmrl.core.host import sent
from mmrl.core.numbers import Count
from mmrl.core.registry import POLICIES, locate
from mmrl.core.sharding import sharded
from mmrl.core.types import (
    Copies,
    Media,
    Point,
    Prompt,
    Rollout,
    TokenOrder,
    per_prompt,
)
from mmrl.policies.base import (
    NO_CONTEXT,
    Drafts,
    RolloutContext,
    rows_and_groups,
)
from mmrl.policies.contracts import (
    Demonstrates,
    EvaluatesGreedily,
    Exports,
    GroupsParameters,
    LimitsLength,
    Measures,
    NamesSpaces,
    ParameterGroup,
    ScoresItself,
    Stateful,
    WritesText,
)
from mmrl.policies.demonstrations import sourced
from mmrl.policies.draft_verification import resized
from mmrl.policies.lora import Lora, merged, save_model
from mmrl.policies.quantization import Quantization, check_quantization
from mmrl.policies.vlm.budgets import admit
from mmrl.policies.vlm.collation import images_in
from mmrl.policies.vlm.completions import completions
from mmrl.policies.vlm.engines.choice import started
from mmrl.policies.vlm.engines.external import ask
from mmrl.policies.vlm.engines.limits import of_model
from mmrl.policies.vlm.engines.vllm_options import Setup, VLLMOptions
from mmrl.policies.vlm.families import Coords, family_of, part_of
from mmrl.policies.vlm.first_look import misfits
from mmrl.policies.vlm.generate import Answers, Ending
from mmrl.policies.vlm.ground_truth import tokens_of, with_ground_truth
from mmrl.policies.vlm.loading import (
    auto_class,
    load_model,
    load_processor,
    text_adapters,
)
from mmrl.policies.vlm.media import Budgets
from mmrl.policies.vlm.options import (
    compile_passes,
    pack_batches,
    refuse_drafts,
    refuse_shards,
    refuse_together,
    refuse_tree,
    replay_experts,
    warnings_of,
)
from mmrl.policies.vlm.parts import (
    Parts,
    adapters_only,
    beside_adapters,
    everything,
    groups_of,
    set_trainable,
    summary,
)
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from mmrl.policies.vlm.processor import Inputs
from mmrl.policies.vlm.refill import Refill
from mmrl.policies.vlm.scoring import Encoded, Passes
from mmrl.policies.vlm.self_check import chosen, fewest, of_first_process, settle
from mmrl.policies.vlm.self_scores import token_id, with_self_scores
from mmrl.policies.vlm.special import digest_of
from mmrl.policies.vlm.trees import TextTree
from samplers.noise import Rng
from samplers.warp import Anneal, Warp

Storage = Literal["float32", "bfloat16", "float16", "auto"]
Engine = Literal["own", "hf", "vllm", "vllm-server"]


@POLICIES.register("vlm")
class VLM(
    Passes,
    Demonstrates,
    WritesText,
    LimitsLength,
    ScoresItself,
    EvaluatesGreedily,
    Measures,
    NamesSpaces,
    GroupsParameters,
    Stateful,
    Exports,
):
    """Trains vision-language models (image, video, audio or text to text), any folder or hub id.

    path: folder, hub id or world:NAME. max_new_tokens: maximum tokens of an answer. temperature,
    top_k, top_p: of sampling and of scoring. anneal: factor of the temperature, falling from token
    to token (EAD). adaptive_temperature: largest relative increase for tokens of high entropy, and
    decrease for those of low entropy (HAPO). stop: strings after which an answer ends.
    greedy_evaluation: greedy decoding in evaluation. budgets: what images, videos and prompts may
    cost. coordinate_space: the space of the model's coordinates, where its family's is unknown.
    prefix_sharing: "prefix" reads a prompt once for its whole group, "none" once for every answer;
    "auto" is prefix, unless a comparison with the model's own pass shows that it is not exact.
    dtype: of the weights. engine: what samples: "own"; "hf", transformers' generate; "vllm", in
    this process; or "vllm-server", a remote one. For all but "own" the engine's log-probs are kept
    along with those of the policy's own passes. vllm: how vLLM is started and gets the weights.
    attention: transformers' implementation; xformers: on CUDA, where rows and images are packed,
    with sdpa elsewhere. remove_padding: prompts and answers are packed without padding; by default
    with xformers, where answers branch, and in scoring passes that would be a quarter padding.
    tree: the answers of a group share prefixes, which are sampled and read once; null: each by
    itself. lora: adapters in the language model. record_question_gain: record the gain in log-prob
    of each answer token from the question, by one more pass, for the reward self_aligned.
    self_score: a token unused in answers, whose log-prob after an answer is the model's own
    verdict, recorded by one more pass for the reward last_token. replay_routing: for mixtures of
    experts, route tokens in training as in sampling. refill: when an answer ends, another takes its
    row, from all prompts that one pass reads: in order (rows); prompts with the longest or shortest
    answers so far first; or by a plan (FPTAS) for lengths predicted from prompt and tokens so far.
    train: instead, how language model, projector and vision tower are each trained; by default all
    fully. quantization: the frozen weights of all blocks in 4 bits (nf4, fp4) or 8 (8bit), under
    adapters. compile: the passes of sampling and scoring, by torch.compile; a text is the name of
    its backend. chat_template_kwargs: variables of the chat template, such as enable_thinking; a
    column of that name gives a row its own.
    """

    capabilities = replace(
        Passes.capabilities,
        makes="text",
        ground_truth=True,
        drafts=True,
    )
    keep_groups_together = True

    def __init__(
        self,
        path: str,
        max_new_tokens: Count = 512,
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_k: Count | None = None,
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0,
        anneal: Anneal | None = None,
        adaptive_temperature: Annotated[float, Ge(0), Lt(1)] = 0.0,
        stop: Sequence[str] = (),
        greedy_evaluation: bool = True,
        budgets: Budgets | None = None,
        coordinate_space: Coords | None = None,
        prefix_sharing: Annotated[Literal["auto", "prefix", "none"], FREE_AT_RESUME] = "auto",
        dtype: Storage = "float32",
        engine: Engine = "own",
        vllm: VLLMOptions | None = None,
        attention: Annotated[
            Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "xformers"],
            FREE_AT_RESUME,
        ] = "sdpa",
        remove_padding: Annotated[bool | None, FREE_AT_RESUME] = None,
        tree: Annotated[TextTree | None, Effects(branches=True)] = None,
        lora: Lora | int | None = None,
        train: Annotated[Parts | None, CHOOSES_WEIGHTS] = None,
        record_question_gain: bool = False,
        self_score: str | None = None,
        replay_routing: bool = False,
        refill: Refill = "none",
        quantization: Quantization | None = None,
        compile: Annotated[bool | str, FREE_AT_RESUME] = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ):
        """Load the model."""
        check_quantization(quantization, adapters_only(lora, train))
        self._find(path, engine, dtype, vllm or VLLMOptions(), lora)
        hf = load_model(self.place, dtype, attention, quantization)
        self._read(hf, budgets or Budgets(), coordinate_space, chat_template_kwargs)
        suppressed = self.inputs.suppressed
        self.warp = Warp(temperature, top_k, top_p, suppressed, adaptive=adaptive_temperature)
        self.anneal = anneal
        self.greedy_evaluation = greedy_evaluation
        self.sharing = prefix_sharing
        self.tree = tree
        self.engine = engine
        self.refill = refill
        refuse_together(self, replay_routing, lora is not None and train is not None)
        lora = text_adapters(hf, lora)
        super().__init__(self._network(hf, attention, remove_padding), lora=lora, **options)
        self._prepare(replay_routing, compile)
        self.ending = self._ending(max_new_tokens, stop)
        self.record_question_gain = record_question_gain
        self.self_score_id = None if self_score is None else token_id(self, self_score)
        self._train(hf, train, lora is None)
        self.report.notes = (
            *self.inputs.family.unverified(),
            summary(self.net),
            *warnings_of(self, hf),
        )

    def _find(
        self, path: str, engine: Engine, dtype: Storage, vllm: VLLMOptions, lora: Lora | int | None
    ) -> None:
        """Find the model's folder and class, and start the engine: first, so that one that cannot
        run fails before the model is loaded."""
        self.place = locate(path)
        rank = lora.rank if isinstance(lora, Lora) else lora or 0
        self.outside = started(engine, Setup(self.place, dtype, vllm, rank))
        self.auto_class = auto_class(self.place)

    def _network(self, hf: Any, attention: str, remove_padding: bool | None) -> SharedPrefix:
        """Wrap the model with the chosen prefix sharing."""
        net = SharedPrefix(hf, share=self.sharing != "none")
        pack_batches(self, net, attention, remove_padding, self.tree is not None)
        refuse_tree(self, net)
        return net

    def _prepare(self, replay_routing: bool, compile: bool | str) -> None:
        """Choose how the network computes its passes."""
        if replay_routing:
            replay_experts(self, self.net)
        compile_passes(self, self.net, compile)

    def _read(
        self, hf: Any, budgets: Budgets, coords: Coords | None, template: dict[str, Any] | None
    ) -> None:
        """Load the processor and set how prompts of the model's family are read."""
        family = family_of(hf.config, coords)
        processor = load_processor(self.place)
        self.inputs = Inputs(processor, hf.config, budgets, family, hf.generation_config, template)

    def _ending(self, max_new_tokens: int, stop: Sequence[str]) -> Ending:
        """Return the stopping rule and the recorded token quantities."""
        reader = self.inputs
        strings = tuple(stop)
        ending = Ending(max_new_tokens, reader.stops, reader.pad, strings, reader.decode)
        return replace(ending, quantities=self.quantities)

    def _train(self, hf: Any, parts: Parts | None, wholly: bool) -> None:
        """Set what is trained: ``parts``, or everything where there is no adapter (``wholly``)."""
        self.parts = parts
        if wholly:
            set_trainable(hf, parts or everything(hf))
        if self.outside is not None:
            self.outside.suits(hf)
        self.sees = any(
            p.requires_grad and part_of(n) != "language" for n, p in hf.named_parameters()
        )

    def spaces(self) -> dict[str, Any]:
        return {"vocabulary": digest_of(self.inputs.tokenizer)}

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        refuse_shards(self.net)
        cond, shown = self.recall(prompts)
        if self.anneal is not None:
            heats = self.anneal.temperatures(self.ending.tokens, context.iteration)
            self.warp = replace(self.warp, schedule=heats)
        self.images += sum(map(images_in, cond))
        self._check(cond)
        if self.tree is not None and self.growing:
            self.tree.fit(copies)
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        size = self.pass_sizes.to_sample(len(row), lambda n: self._try(cond, group[:n]))
        drafts = context.drafts(prompts, copies) if context.drafts else None
        if drafts is not None:
            return self._speculated(drafts, cond, group, row, rng, size).replace(
                prompts=tuple(shown)
            )
        if self.outside is None:
            answers = self._answers(cond, group, row, rng, size)
            if self.refill == "plan":
                self.lengths.learn(self.device)
        else:
            answers = self._asked(prompts, copies, row, rng)
        rollout = self._recorded(answers, cond, group, row).replace(prompts=tuple(shown))
        if self.engine != "own":
            rollout = self._rescored(rollout, size)
        if context.ground_truth is None:
            return self._finished(rollout, size)
        last = torch.tensor(per_prompt(copies, len(prompts))).cumsum(0) - 1  # row of every group
        rows = sent(last, self.device)
        corrected = with_ground_truth(self, rollout, context.ground_truth, rows, size)
        return self._finished(corrected, size)

    def _asked(self, prompts: list[Prompt], copies: Copies, row: Tensor, rng: Rng) -> Answers:
        """Let the external engine answer the prompts."""
        requests = [
            request
            for prompt, size in zip(prompts, per_prompt(copies, len(prompts)), strict=True)
            for request in [self.inputs.engine_prompt(prompt)] * size
        ]
        return ask(
            self.outside, self.net.hf, requests, row, rng, self.warp, self.ending, self.clock
        )

    def _finished(self, rollout: Rollout, size: int) -> Rollout:
        """Record the measurements of whole answers."""
        return with_self_scores(self, self.with_divergence(rollout, size), size)

    def _recorded(
        self, answers: Answers, cond: list[Encoded], group: Tensor, row: Tensor
    ) -> Rollout:
        # a row of the network for every sampled token
        self.report.forwards += int(answers.mask.sum())
        order = torch.arange(answers.ids.shape[1], device=self.device).expand_as(answers.ids)
        rollout = Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=answers.ids,
            mask=answers.mask,
            logprob=answers.logprob,
            trajectory=TokenOrder(commit_step=order),
            edge_id=answers.edge_id,
        )
        rollout = self.with_recorded(rollout, answers.values)
        if self.net.routing is None:
            return rollout
        routed = [{**c, "routes": self.prompt_routes[p]} for p, c in enumerate(cond)]
        routes = rollout.tokens.replace(routes=answers.routes)
        return rollout.replace(cond=routed, trajectory=routes)

    def _speculated(
        self,
        drafts: Drafts,
        cond: list[Encoded],
        group: Tensor,
        row: Tensor,
        rng: Rng,
        size: int,
    ) -> Rollout:
        """Answer from the accepted prefixes of earlier answers."""
        refuse_drafts(self)
        drafts = resized(drafts, self.ending.tokens)
        answers = self._answers(cond, group, row, rng, size, drafts)
        assert answers.num_accepted is not None
        drafts.accepted.append(torch.stack([answers.num_accepted, drafts.mask.sum(1)], 1).cpu())
        # a draft costs one row of the network, and its accepted tokens no more
        self.report.forwards += len(row) - int(answers.num_accepted.sum())
        return self._finished(self._recorded(answers, cond, group, row), size)

    @torch.no_grad()
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        cond, shown = self.recall(prompts)
        self.images += sum(map(images_in, cond))
        self._check(cond)
        row, group = rows_and_groups(prompts, 1, rng, self.device)
        ids = torch.full((len(row), self.ending.tokens), self.inputs.pad)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for i, (prompt, text) in enumerate(zip(shown, answers, strict=True)):
            tokens = tokens_of(self, prompt, text, ids.shape[1])
            if tokens is not None:
                ids[i, : len(tokens)] = torch.tensor(tokens)
                mask[i, : len(tokens)] = True
        order = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        rollout = Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=sent(ids, self.device),
            mask=sent(mask, self.device),
            logprob=torch.zeros(ids.shape, dtype=self.dtype, device=self.device),
            prompts=tuple(shown),
            trajectory=TokenOrder(commit_step=order),
        )
        rollout = self.with_unknown(sourced(rollout, sent(mask.any(1), self.device)))
        if not score:
            return rollout
        return with_self_scores(self, self.scored(rollout), self.pass_sizes.rows or len(row))

    def text_of(self, ids: list[int]) -> str:
        return self.inputs.decode(ids)

    def recall(self, prompts: list[Prompt]) -> tuple[list[Encoded], list[Prompt]]:
        """Encode prompts again, and return them as ``rollout`` does."""
        taken = [self._encoded(prompt) for prompt in prompts]
        return [encoded for encoded, _ in taken], [
            {**prompt, "view": view} for prompt, (_, view) in zip(prompts, taken, strict=True)
        ]

    def measures(self) -> dict[str, float]:
        curves = {"vlm/vision_passes": self.towered / self.images} if self.images else {}
        curves |= {"engine/gap": sum(self.gaps) / len(self.gaps)} if self.gaps else {}
        curves |= self.clock.lap_with_share("sync") if self.outside is not None else {}
        self.images = 0
        self.towered = 0
        self.gaps = []
        return curves

    def state_dict(self) -> dict[str, Any]:
        return {"lengths": self.lengths.state_dict()} if self.refill == "plan" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lengths.load_state_dict(state.get("lengths", {}))

    def parameter_groups(self) -> list[ParameterGroup]:
        return groups_of(self.net, self.parts)

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        limits = self.outside.limits if self.outside else of_model(self.net.hf.config)
        if problems := misfits(prompts, self.inputs, limits, self.ending.tokens):
            raise BrokenRows(problems, len(prompts))
        admitted = admit(prompts, self.inputs.budgets, self.inputs.measure)
        self.report.notes = (*self.report.notes, *admitted.notes)
        self.compared = self.compared or chosen(admitted.prompts, self.limits.some)
        return admitted.prompts

    def enable_gradient_checkpointing(self) -> None:
        self.net.enable_gradient_checkpointing()

    def cannot_go_on(self) -> str:
        if self.engine != "own":
            return (
                "only the policy's own sampler goes on with an answer: set policy.vlm.engine: own"
            )
        return ""

    def most_new_tokens(self) -> int:
        return self.ending.tokens

    def set_max_new_tokens(self, tokens: int) -> None:
        """Limit answers to that many new tokens from now on."""
        self.ending = replace(self.ending, tokens=tokens)

    def decode(self, rollout: Rollout) -> Media:
        return completions(self.inputs, self.ending, rollout)

    def sample_in_evaluation(self) -> None:
        self.greedy_evaluation = False

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        before = self.warp
        self.growing = False
        if self.greedy_evaluation:
            self.warp = Warp(temperature=0.0, suppressed=before.suppressed)
        try:
            yield
        finally:
            self.warp = before
            self.growing = True

    def export(self, folder: Path) -> None:
        """Save the model, or its adapter where nothing else was trained, with processor and chat
        template."""
        hf = self.net.hf
        if beside_adapters(hf):  # transformers saves only the adapters of a model that has some
            whole = pretrained.load_model(type(hf), self.place, dtype=hf.dtype)
            whole.load_state_dict(merged(hf))
            hf = whole
        save_model(hf, folder)
        self.inputs.save(folder)

    def path(self, rollout: Rollout) -> Iterator[Point]:
        for point in super().path(rollout):
            yield point.replace(routes=rollout.tokens.routes)

    @torch.no_grad()
    def _rescored(self, rollout: Rollout, size: int) -> Rollout:
        """Score by the policy's own passes what another engine sampled; the engine's log-probs are
        kept as ``sampler_logprob``."""
        every = [
            (self._scored(rollout[part]), counts)
            for part, counts in self.pass_sizes.chunks(len(rollout), size)
        ]
        scored = [part for part, counts in every if counts]
        logprob = torch.cat([part.logprob for part in scored])
        self.gaps.append(float((logprob - rollout.logprob)[rollout.mask].abs().mean()))
        provenance = rollout.provenance.replace(sampler_logprob=rollout.logprob)
        entropy = None
        if self.record_entropy:
            entropy = torch.cat([part.entropies() for part in scored])
        return rollout.replace(logprob=logprob, entropy=entropy, provenance=provenance)

    def _check(self, cond: list[Encoded]) -> None:
        """Compare, once, the passes with the model's own forward pass, on prompts of the run where
        they are known."""
        if self.checked:
            return
        self.checked = True
        if self.compared:
            cond = self.encode(self.compared)
        elif sharded(self.net):
            cond = of_first_process(fewest(cond), torch.device(self.device))
        settle(self, fewest(cond))

    def _scored(self, rollout: Rollout) -> Rollout:
        """Score rows by the policy's own pass: their log-probs and, if recorded, entropies."""
        (point,) = self.path(rollout)
        dist = self.dist(point)
        entropy = dist.entropy().to(rollout.logprob) if self.record_entropy else None
        logprob = dist.log_prob(point.target).to(rollout.logprob)
        return rollout.replace(logprob=logprob, entropy=entropy)
