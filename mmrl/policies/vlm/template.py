"""Renders a prompt's messages by the chat template of a processor, or of its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.thoughts import THOUGHTS, opened_by
from mmrl.core.types import Prompt
from mmrl.policies.vlm.media import where

CLOSING = tuple(end.lower() for _, end in THOUGHTS)
FIXED = ("messages", "tokenize", "add_generation_prompt", "chat_template")  # not the user's
# what a template that expects text renders of a list of parts
WRITTEN_OUT = re.compile(r"""\[\{['"]type['"]: """)


class Template:
    """Renders messages whose content is parts. ``options``: extra variables of the template, for
    all prompts; a row's ``chat_template_kwargs`` take precedence."""

    def __init__(self, processor: Any, tokenizer: Any, name: str, options: Mapping[str, Any]):
        self.processor = processor
        self.tokenizer = tokenizer
        self.name = name
        self.options = dict(options)
        self.own = getattr(processor, "chat_template", None)
        self.source = self.own or getattr(tokenizer, "chat_template", None)
        self._check("policy.vlm", self.options)

    def render(self, prompt: Prompt, messages: list[dict[str, Any]], answers: bool = True) -> str:
        """Return the text of messages, with the generation prompt if it ``answers``. Raises
        UserError naming the prompt where the template fails, and for roles without a template."""
        if not self.source:
            return self._plainly(prompt, messages)
        options = self.options | self._of_row(prompt)
        try:
            rendered = self._applied(messages, answers, options)
            if WRITTEN_OUT.search(rendered):
                raise TypeError("content is written out as a list")
            return rendered
        except Exception as error:  # a template can raise any error
            refused = error
        try:  # a template for text only
            return self._applied(self._joined(messages), answers, options)
        except Exception:
            raise UserError(
                f"{where(prompt)}: the chat template of {self.name} refuses it: {refused}"
            ) from refused

    def _applied(
        self, messages: list[dict[str, Any]], answers: bool, options: dict[str, Any]
    ) -> str:
        by = self.processor if self.own else self.tokenizer
        rendered: str = by.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answers, **options
        )
        return rendered

    def _of_row(self, prompt: Prompt) -> dict[str, Any]:
        """Return the ``chat_template_kwargs`` of a row, a mapping or its JSON; columns of files
        fill absent keys with None."""
        variables = prompt.get("chat_template_kwargs")
        if isinstance(variables, str):
            with suppress(ValueError):  # refused below
                variables = json.loads(variables)
        if variables is None:
            return {}
        if not isinstance(variables, Mapping):
            raise UserError(
                f"{where(prompt)}: chat_template_kwargs is {type(variables).__name__}, expected "
                "names and values, such as {enable_thinking: false}"
            )
        options = {name: value for name, value in variables.items() if value is not None}
        self._check(where(prompt), options)
        return options

    def _check(self, place: str, options: Mapping[str, Any]) -> None:
        """Raise UserError for variables that the template does not read."""
        source = self.source
        texts = source.values() if isinstance(source, Mapping) else [source or ""]
        for name in options:
            read = any(re.search(rf"\b{re.escape(str(name))}\b", text) for text in texts)
            if name in FIXED or not read:
                raise UserError(
                    f"{place}: chat_template_kwargs.{name}: the chat template of {self.name} reads "
                    "no such variable; leave it out, or use the template that has it"
                )

    def _plainly(self, prompt: Prompt, messages: list[dict[str, Any]]) -> str:
        """Return the text of a single question, where there is no template for roles."""
        if len(messages) > 1 or messages[0]["role"] != "user":
            raise UserError(
                f"{where(prompt)}: {self.name} has no chat template, neither its processor nor its "
                f"tokenizer, so the turns of {', '.join(m['role'] for m in messages)} cannot be "
                "written; add chat_template.jinja to the model's folder, or ask one question as "
                "text"
            )
        joined: str = self._joined(messages)[0]["content"]
        return joined

    def _joined(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with text content, in which the processor's placeholders represent
        images, clips and audio."""

        def text(part: dict[str, Any]) -> str:
            if part["type"] == "text":
                return str(part["text"])
            mark = getattr(self.processor, f"{part['type']}_token", "") or ""
            return str(getattr(mark, "content", mark))  # a token object, or its text

        return [dict(m, content="".join(map(text, m["content"]))) for m in messages]

    def closes(self) -> str:
        """Return what the template writes after an answer; empty without a template."""
        if not self.source:
            return ""
        turns = [
            {"role": role, "content": [{"type": "text", "text": "x"}]}
            for role in ("user", "assistant")
        ]
        return self.render({}, turns, answers=False).rpartition("x")[2]


def behind(begun: str, text: str) -> str:
    """Return the part of an answer's ``text`` after ``begun``, with which its prompt ends; white
    space after the thinking tag may differ."""
    mark = begun.rstrip() if opened_by(begun) else begun
    return text.removeprefix(begun) if text.startswith(begun) else text.removeprefix(mark)


def check_thought(prompt: Prompt, begun: str, text: str) -> None:
    """Raise UserError for a given answer without a thought after a prompt that opens one."""
    mark = opened_by(begun).strip()
    ends = any(end in text.lower() for end in CLOSING)
    if mark and not ends:
        raise UserError(
            f"{where(prompt)}: its chat template opens a thought ({mark}), in which the written "
            f"answer {text[:40]!r} would stand; begin the answer with {mark}, a thought and its "
            "end, or set policy.vlm.chat_template_kwargs so that the template opens none"
        )
