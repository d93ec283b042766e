"""Detects the language of a short answer by its function words, so that words that mean something
else in another language ("war", "son", "due") are read in their own language only."""

from __future__ import annotations

import re
from functools import lru_cache

COMMON = {
    "en": "the a an is are was were of in on and to it this that there i with for at by no not see "
    "has have he she they you my so but or as be we his her image shows",
    "de": "der die das den dem des ein eine einen einem einer ist sind war waren und auf im am zu "
    "mit es gibt zeigt nicht von f\u00fcr bild foto zwischen bis lautet betr\u00e4gt hei\u00dft "
    "diese "
    "dieser dieses ich wir sehe",
    "fr": "le la les des du un une est sont dans sur il y et de l' c' s' d' n' j' qui au aux entre "
    "\u00e9tait cette cet ces je vois nous on",
    "es": "el la los las un una es son en del al hay de y que lo se entre era fue este esta veo",
    "pt": "o os as um uma \u00e9 s\u00e3o no na do da h\u00e1 de e em que entre foi se este esta "
    "vejo",
    "it": "il la lo gli un una \u00e8 sono nel nella di e che del della ci si tra era l' questo "
    "questa "
    "vedo nell",
    "nl": "de het een is zijn op er in van en dat tussen heet toont deze dit ik zie",
}
# what begins a conclusion
THEREFORE = (
    r"(?:(?:so|thus|hence|therefore|then|finally|overall|altogether|consequently|accordingly|"
    r"as a result|in conclusion|in summary|in total|also|daher|damit|somit|folglich|demnach|"
    r"deshalb|insgesamt|donc|ainsi|par cons\u00e9quent|au total|por lo tanto|por tanto|"
    r"as\u00ed que|entonces|en total|portanto|logo|ent\u00e3o|no total|quindi|dunque|pertanto|"
    r"perci\u00f2|in totale|dus)(?![^\W_])|"
    r"\u56e0\u6b64|\u6240\u4ee5|\u6545|[\u603b\u7e3d]\u5171|\u4e00\u5171|"
    r"\u3088\u3063\u3066|\u3057\u305f\u304c\u3063\u3066|\ub530\ub77c\uc11c)"
)
LANGUAGES = {code: frozenset(words.split()) for code, words in COMMON.items()}
WORD = re.compile(r"\b[cdjlns]'|[^\W\d_]+")
SHORT = 400  # characters of a text that are read


@lru_cache(maxsize=4096)
def language_of(text: str) -> str:
    """Return the language with most of a text's words among its function words; English in a
    tie."""
    words = {*WORD.findall(text[:SHORT].casefold())}
    counts = {code: len(words & known) for code, known in LANGUAGES.items()}
    most = max(counts.values())
    best = [code for code, count in counts.items() if count == most]
    return best[0] if len(best) == 1 and most else "en"


# sentences that say "there is none", in other languages than English
ABSENT = re.compile(
    r"(?:(?:[\w ]{0,40} )?(?:es gibt|gibt es|sind|ist|sehe(?: ich)?|sieht man) keine?[nr]?|"
    r"(?:[\w ]{0,40} )?il n'y a(?:vait)? (?:aucune?|pas de|pas d')|"
    r"(?:[\w ]{0,40} )?no (?:hay|se ven?)(?: ning[u\u00fa]n[oa]?)?|"
    r"(?:[\w ]{0,40} )?n\u00e3o (?:h\u00e1|se v\u00eaem|existem)(?: nenhuma?)?|"
    r"(?:[\w ]{0,40} )?non (?:ci sono|c'\u00e8)(?: nessun[oa]?)?|"
    r"(?:[\w ]{0,40} )?er zijn geen) (?P<noun>[^\W\d_]+)(?: [\w' ]{0,40})?[ .]*|"
    # in the picture there is no X
    r"[^\W\d]{0,6}[\u56fe\u5716\u7247\u9762][^\W\d]{0,3}[\u6ca1\u6c92]\u6709"
    r"(?!.*(?:\u7b54|\u8db3\u591f|\u63d0\u4f9b|\u663e\u793a|\u95ee))[^\W\d]{1,10}[ .\u3002]*|"
    r"[^\W\d]{1,8}\u306b\u306f?[^\W\d]{1,12}[\u306f\u304c](?:\u5199\u3063\u3066)?"
    r"(?:\u3044|\u3042\u308a)\u307e\u305b\u3093[ .\u3002]*|"
    r"(?:keine?[nrs]?|aucune?|ning[u\u00fa]n[oa]?|nenhuma?|nessun[oa]?|geen|"
    r"[\u6ca1\u6c92]\u6709)[ .\u3002]*"
)
# nouns of "there is no ..." in a sentence about the question
ABSTRACT = {
    *"antwort zweifel ahnung m\u00f6glichkeit grund problem frage doute doutes r\u00e9ponse "
    "id\u00e9e probl\u00e8me moyen raison duda dudas respuesta idea problema manera forma "
    "raz\u00f3n m\u00e1s mas d\u00favida resposta ideia maneira dubbio risposta modo mehr weniger "
    "plus moins menos suficiente suficientes genug".split()
}


def absent(text: str) -> bool:
    """Tell whether a lower-case sentence says "there are none": "es gibt keine hunde"."""
    match = ABSENT.fullmatch(text)
    return match is not None and match["noun"] not in ABSTRACT
