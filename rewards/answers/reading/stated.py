"""Finds the span that states the answer: in a box, in JSON, in a fence, or after "the answer
is"."""

from __future__ import annotations

import json
import re

from rewards.answers.reading.objects import literal
from rewards.answers.reading.parts import Final, fenced, final, last_box
from rewards.answers.reading.plain import SHORT, evened, without_markdown

# keys under which models put an answer in JSON
KEYS = (
    "answer final_answer finalanswer final choice option letter result value number count total "
    "answer_letter answer_choice selected_answer selected_option chosen_option correct_answer "
    "correct_option predicted_answer prediction predicted_label final_result solution label class "
    "category species breed object class_name category_name predicted_class text output response"
).split()
# "the answer is" in the languages of the models' makers and users
NOUN = (
    r"answers?(?: to (?:the|this) question)?|solution|result|conclusion|ergebnis|r[eé]sultat|"
    r"resultado|risultato|结果|結果|结论|結論|correct (?:option|choice|letter)s?|"
    r"答案|正[确確]的?[选選][项項]|r[eé]ponses?|antwort(?:en)?|antwoord(?:en)?|respuestas?|"
    r"respostas?|rispost[ae]|"
    r"ответы?|정답|답|答え|正解|"
    r"الإجابة|الجواب|"
    r"उत्तर|đáp án|cevap|odpowiedź|jawaban(?:nya)?|"
    r"ค(?:ำ|ํา)ตอบ"
)
AFTER = (
    r"(?: choices?| options?| letters?| correct[ae]?s?| corret[ao]s?| corrett[ae]| exactes?"
    r"| richtige| final[e]?| الصحيحة| đúng)?"
)
IS = (
    r"(?:\s*[:=]|\s+(?:is|are|would be|should be|must be|will be|has to be|es|son|est|sont|ist|"
    r"sind|lautet|lauten|é|são|è|sono|zijn|هي|هو|है|là|adalah|to|brzmi)\b|"
    r"\s*(?:[应應][该該]?[是为為选選]|是|为|為|选|選|は|은|는))\s*[:=]?"
)
SAYS = re.compile(
    rf"(?<![A-Za-z])(?:{NOUN}){AFTER}{IS}(?!\s*not\b)|\b(?:ist|lautet) die (?:\w+ )?Antwort\b", re.I
)
SPOKEN = re.compile(NOUN, re.I)
HEAD = re.compile(rf"(?:\w+ ){{0,2}}(?:{NOUN}){AFTER}\s*$", re.I)
DENIED = re.compile(
    r"\b(?:not|never|wrong|incorrect|false|opposite|if|whether|unless|cannot|falschen?|"
    r"mauvaises?|fausses?|incorrectas?|erradas?|sbagliat[ae])\b|n't\b|[错錯不]",
    re.I,
)
CLAUSE = re.compile(r"[.;!?\n,]")
# no sentence ends after an initial or a short title: B. a dog, Mt. Everest
SENTENCE = re.compile(
    r"(?<=[\w)\]}$%\"'*][\w)\]}$%\"'*][\w)\]}$%\"'*][.!?])\s+(?=[^\W\d_a-z])|"
    r"(?<=\d[.!?])\s+(?=[^\W\d_a-z])|(?<=\u3002)"
)


def stated(text: str) -> Final:
    r"""Return the span of a text that states the answer, without tags.

    Searched in the result of ``final``: the last ``\boxed`` (nested: the innermost) or GLM's box
        tokens, else "answer" in JSON, else the last code fence; and the text after the last "the
        answer is", if that follows the box. "repaired" if a box or an ``<answer>`` is not closed.
    """
    answer = final(text)
    body, status = answer.value, answer.status
    box = last_box(body)
    announcement = announced(body[box.end :] if box else body)
    if box and (not announcement or not announcement.strip("*_`$ .")):
        return Final(box.inside, status if box.closed else "repaired")
    if announcement is not None:
        inner = last_box(announcement)
        return Final(inner.inside if inner else announcement, status)
    inside = fenced(body).strip()
    if inside[:1] in ("{", "["):
        return Final(_of_json(inside), status)
    return Final(without_reasons(inside), status)


# a line that names what it says, and one that begins a section about why
FIELD = re.compile(
    r"[\s*_#-]*(?:(?:the|final|best|predicted|image|main|object) )*"
    r"(?:categor(?:y|ie)|class(?:ification)?|label|prediction|object|species|breed|type|answer|kategorie|klasse|cat[ée]gorie|classe|"
    r"categor[ií]a|clase|categoria|etiqueta|类别|類別|分类|分類|标签|標籤|カテゴリ|분류)"
    r"(?: name)?[*_]*\s*[:：][*_]*\s*(?=\S)",
    re.I,
)
REASONS = re.compile(
    r"[\s*_#-]*(?:(?:reason(?:s|ing)?|explanation|justification|rationale|why|confidence|evidence|"
    r"key features|begründung|erklärung|explication|raison|justificat(?:ion|ivo)|explicación|razón|"
    r"explicação|justificativa|spiegazione|motivazione|理由|解释|解釋|原因|说明|說明|置信度|"
    r"説明|이유|설명)(?: (?:score|level))?[*_]*\s*[:：]|because\b|weil\b|因为|因為)",
    re.I,
)


def without_reasons(text: str) -> str:
    """Return the one line of an answer surrounded by sections of reasoning, without the name of its
    field ("Category: airplane"); any other text unchanged."""
    if "\n" not in text or len(text) > SHORT or CORRECTS.search(text):
        return text
    answers, reasons = [], False
    for line in text.split("\n"):
        if REASONS.match(line):
            reasons = True
        elif FIELD.match(line) or line.strip() and not reasons:
            answers.append(line)
    field = FIELD.match(answers[0]) if len(answers) == 1 else None
    if not reasons or len(answers) != 1 or len(answers[0]) > 80:
        return text
    return answers[0][field.end() :].strip("*_ ") if field else answers[0]


HEDGED = re.compile(r"\b(?:or|maybe|perhaps|might|could|either|possibly)\b", re.I)
BOLD = re.compile(r"(?<![A-Za-z\d_*\\])\*\*(?=[^\s*])([^*\n]{1,160})\*\*(?![A-Za-z\d_*])")


def emphasised(span: str) -> str | None:
    """Return the only bold words of an answer, if nothing in it is denied or left open: "The
    capital is **Paris**."; None if there are none, or all of it is bold."""
    if "**" not in span or len(span) > SHORT:
        return None
    bold = BOLD.findall(span)
    if len(bold) != 1 or bold[0].endswith(":") or re.search(r"\*\*\s*:", span):
        return None
    rest = BOLD.sub(" ", span)
    if not re.search(r"\w", rest) or DENIED.search(rest) or HEDGED.search(rest):
        return None
    return str(bold[0])


# words that retract an announced answer
CORRECTS = re.compile(
    r"(?:\bwait,? no\b|(?<=[.!?] )no,|\bthat(?:'s| is) (?:wrong|incorrect|not (?:right|correct))|"
    r"\bcorrection\b|"
    r"\bactually\b|\bI made a mistake\b|\bon second thought\b|\u4e0d\u5bf9|\u4e0d\u5c0d|"
    r"[错錯]了)[\s,.:;!\uff0c-]*",
    re.I,
)
DISPLAYS = {"\\[": "\\]", "$$": "$$"}  # what opens and closes a displayed formula
LAST = 3_000  # characters at the end of an answer in which it is announced


def announced(text: str) -> str | None:
    """Return what follows the last "the answer is" up to the end of its line, or below a heading
    "Answer"; None if nothing is announced, or the clause before denies it."""
    if len(text) < 4:
        return None
    text = evened(text[-LAST:])
    if not SPOKEN.search(text):
        return None
    text = without_markdown(text)
    for place in reversed(list(SAYS.finditer(text))):
        before = CLAUSE.split(text[max(0, place.start() - 80) : place.start()])[-1]
        if not DENIED.search(before):
            rest = text[place.end() :].strip("*_ \t\n")
            if correction := list(CORRECTS.finditer(rest)):
                return rest[correction[-1].end() :].strip()
            sentence = SENTENCE.split(_first_line(rest), maxsplit=1)[0].strip()
            return None if sentence.endswith("?") else sentence
    lines = [line for line in text.split("\n") if line.strip()]
    for at in range(len(lines) - 2, -1, -1):
        if len(lines[at]) < 60 and HEAD.fullmatch(lines[at].strip(" :*_#")):
            return _first_line("\n".join(lines[at + 1 :]))
    return None


def _first_line(text: str) -> str:
    """Return the first non-empty line, with the rest of the displayed formula that it opens."""
    lines = text.split("\n")
    at = next((i for i, line in enumerate(lines) if line.strip("*_ \t")), len(lines) - 1)
    opened = lines[at].strip()
    if opened.startswith("```"):
        inside = fenced("\n".join(lines[at:]))
        return _of_json(inside) if inside[:1] in ("{", "[") else inside
    if opened in DISPLAYS:
        inside, closed, _ = "\n".join(lines[at + 1 :]).partition(DISPLAYS[opened])
        return f"${' '.join(inside.split())}$" if closed else inside.strip()
    return opened


def _of_json(text: str) -> str:
    """Return what a JSON object, or a Python dict, has under "answer", or as its only value; a list
    of one value is that value. Anything else is unchanged."""
    value = literal(text)
    if isinstance(value, dict):
        low = {str(key).casefold().replace(" ", "_"): inner for key, inner in value.items()}
        named = [low[key] for key in KEYS if key in low]
        value = named[0] if named else next(iter(low.values())) if len(low) == 1 else value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (dict, list, str, int, float)):
        return text
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)
