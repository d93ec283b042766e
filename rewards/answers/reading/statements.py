"""Extracts the predicate of a plain sentence: the name in "The capital is Paris.", in the languages
of the models' makers and users.

What follows the verb is the predicate, and a predicate counts as a whole: "light blue" is not blue.
A sentence that denies, doubts or compares says nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rewards.answers.reading.languages import THEREFORE, language_of
from rewards.answers.reading.plain import SHORT, bare, plain
from rewards.answers.reading.stated import SENTENCE


def _words(text: str) -> str:
    return rf"(?<![^\W_])(?:{text})(?![^\W_])"


# verbs that say what something is, is called, or shows; those of scripts without blanks everywhere
VERBS = {
    "en": r"(?:(?:is|are|can be) )?(?:classified|identified|described|recogni[sz]ed) as|"
    r"classify (?:this|it)(?: \w+)? as|belongs to the (?:class|category)(?: of)?|points?|turned|"
    r"holds|wears|carries|rides|plays|is|are|was|were|equals?|shows?|depicts?|displays?|portrays?|represents?|contains?|says|"
    r"reads|(?:appears?|seems?)(?: to be)?|looks? like",
    "de": r"ist|steht|sagt|sind|war|waren|lautet|betr\u00e4gt|hei\u00dft|heisst|zeigt|"
    r"es handelt sich um",
    "fr": r"est(?: de)?|dit|indique|affiche|sont|\u00e9tait|vaut|s'appelle|montre|"
    r"repr\u00e9sente|il s'agit d(?:e|'une?)",
    "es": r"es(?: de)?|dice|son|era|fue|muestra|representa|se llama|se trata de",
    "pt": r"\u00e9(?: de)?|diz|s\u00e3o|era|foi|mostra|representa|trata-se de|chama-se",
    "it": r"\u00e8(?: di)?|dice|sono|era|mostra|rappresenta|si chiama|si tratta di",
    "nl": r"is|zegt|zijn|was|heet|toont",
}
EVERYWHERE = (
    _words(r"\u044d\u0442\u043e|\u044f\u0432\u043b\u044f\u0435\u0442\u0441\u044f")
    + r"|(?<=\bit)'s(?= )|(?<=\bthat)'s(?= )|(?<=\bhe)'s(?= )|(?<=\w) - (?=\w)|"
    r"(?<=[^\W\d]):(?=\s)|[应應][该該]是|[写寫][着著]|[写寫]的是|[是为為叫]|[显顯]示(?:了|的是)?|"
    r"は|(?<=[가-힣])[은는](?= )"
)
SPEAKING = {
    code: re.compile(f"{_words(verbs)}|{EVERYWHERE}", re.I) for code, verbs in VERBS.items()
}
# what closes a predicate in languages whose verb comes last
CLOSING = re.compile(
    r"(?:\s+(?:zu sehen|zu erkennen|abgebildet|dargestellt)|\u3067\u3059|\u3067\u3042\u308b|\u3060|"
    r"\u3068\u66f8\u304b\u308c\u3066\u3044\u307e\u3059|\u3068\u66f8\u3044\u3066\u3042\u308a\u307e\u3059|"
    r"\s?\uc785\ub2c8\ub2e4|\uc774\ub2e4|\uc774\uc5d0\uc694)$"
)
# between a form of "to be" and the name: is called X, was taken in X, is wearing X
PARTICIPLE = re.compile(
    r"^(?:called|named|titled|labell?ed|known as|identified as|classified as|"
    r"made (?:out of|up of|of|from|by|in)|(?:located|situated|found|set|held) (?:in|at|on|every)|"
    r"taken (?:in|at)|(?:written|painted|filmed|shot|built|drawn) (?:in|by|at|on|with)|"
    r"wearing|holding|riding|playing|eating|drinking|carrying|using|driving|reading|"
    r"doing|that of|in|on|at|"
    r"colou?red|painted|(?:pointing|points|turning|facing|looking|moving|going|heading)"
    r"(?: (?:to|towards?)(?: the)?)?|(?:to|on) the(?= (?:left|right)$))\s+(?=\S)",
    re.I,
)
PLACED = re.compile(
    r"^(?:located|situated|positioned|placed|found|standing|sitting|lying)\s+", re.I
)
ADVERB = re.compile(
    r"^(?:clearly|currently|definitely|indeed|simply|certainly|obviously|evidently)\s+", re.I
)
ARTICLES = re.compile(
    r"^(?:(?:the|an?|der|die|das|dem|den|ein|eine[nmr]?|les?|la|une?|des|el|los|las|un[ao]s?|"
    r"os?|uma?|il|lo|gli|i|uno|het|een)\s+|l'|"
    r"一[只隻个個张張条條头頭位辆輛棵种種匹本])(?=\S)",
    re.I,
)
# "a dog, not a cat", "rot, nicht blau": the other name is only mentioned
CONTRAST = re.compile(
    r"(?:,\s*(?:and |und |et |y )?|\s+)(?:not|nicht|pas|non|n\u00e3o|niet|rather than|instead of) "
    r"(?!(?:sure|certain|clear|correct|right|true|possible|likely|exactly|quite|only|just|it|that|so|"
    r"yet|really|the answer|sicher|richtig|seguro|s\u00fbr)\b)[^,.;:!?]{1,60}$|"
    r"[,\uff0c]?\s*(?:\u800c\u4e0d\u662f|\u4e0d\u662f)[^,.;:\uff0c]{1,30}$",
    re.I,
)
# a reason, or a detail about the name
TAIL = r"(?:(?!\b(?:or|oder|ou|but)\b).)*"
BEHIND = re.compile(
    r"(?:,?\s+(?:because|since|as (?:shown|seen|indicated|evidenced)|according to|based on|"
    r"judging by|weil|parce que|porque|perch\u00e9|omdat)\b.*|"
    rf",\s+(?:the|an?|which|who|whose|located|known|recogni[sz]able|identifiable|as)\b{TAIL}|"
    rf",\s+\w+(?:ed|en|ing) (?:with|by|in|on|from|as|for)\b{TAIL}|,?\s+(?:with|at) "
    rf"[\d.,]+\s*%?{TAIL}|"
    r"\s+in (?:\w+ ){0,3}(?:letters|capitals|font|script)|"
    r"\s+in (?:her|his|their|its) hands?|\s+in colou?r|\s+\([\d.,]+\s?%?\)|"
    r"[,\uff0c]?因[为為].*|"
    r",?\s+(?:(?:visible|shown|seen|depicted|here) )?(?:in|on) (?:the|this) (?:image|picture|photo|"
    r"photograph|scene|chart|graph|figure|video))$",
    re.I | re.S,
)
# words of doubt, denial, correction or comparison
DOUBTS = re.compile(
    _words(
        r"former|formerly|previously|used to|impression|(?:people|some|many|others?|they)"
        r" (?:\w+ ){0,2}(?:say|think|claim|believe|argue|guess)|allegedly|supposedly|"
        r"rumou?r(?:s|ed)?|claim(?:s|ed)?|"
        r"would(?! "
        r"(?:classify|describe|identify))|"
        r"doubts?|"
        r"wrongly|falsely|nobody|unlikely|impossible|"
        r"not|never|no|nor|neither|without|except|wrong|incorrect|false|mistake(?:n(?:ly)?)?|opposite|"
        r"guess|if|unless|whether|cannot|unable|unclear|unsure|or|maybe|perhaps|might|may|could|either|"
        r"possibly|but|however|although|though|while|whereas|instead|rather|unlike|similar|thought|"
        r"first glance|initially|hardly|barely|almost|wait|n't|"
        r"nicht|keine?[nmrs]?|nie|oder|vielleicht|m\u00f6glicherweise|k\u00f6nnte|falsch|aber|sondern|"
        r"pas|jamais|aucune?|ou|peut-\u00eatre|pourrait|mais|faux|fausse|"
        r"nunca|ning[u\u00fa]n[oa]?|quiz[a\u00e1]s?|tal vez|podr[i\u00ed]a|pero|sino|falso|"
        r"incorrecto|"
        r"n\u00e3o|nem|talvez|poderia|errado|non|mai|forse|potrebbe|ma|oppure|"
        r"niet|geen|nooit|misschien|maar|"
        r"\u043d\u0435|\u043d\u0435\u0442|\u0438\u043b\u0438|\u043d\u043e|"
        r"\u0432\u043e\u0437\u043c\u043e\u0436\u043d\u043e"
    )
    + r"|n't\b|[\u4e0d\u6ca1\u6c92\u975e\u672a]|[并並]非|\u53ef\u80fd|也[许許]|\u6216|"
    r"\u5927\u6982|"
    r"\u4f46|\u3067\u306f|\u3058\u3083|\u306a\u3044|\u304b\u3082|\u304a\u305d\u3089\u304f|\uc544\ub2c8|"
    r"\uc544\ub2d9|\uc544\ub9c8|\ub610\ub294",
    re.I,
)
# a verb in a clause about the subject, or one that introduces the rest
CLAUSE = re.compile(
    r"(?:who|which|that|where|what|as|qui|que|che|die|der|das)\s*$|"
    r"\w(?<!\band)(?<!\bbut)(?<!\bso) (?:he|she|they|you|we|it)\s*$",
    re.I,
)
EVIDENT = re.compile(
    r"\s*(?:clear|clearly|evident|obvious|visible|apparent|shown|klar|clair|claro) (?:that|dass|"
    r"que)\b"
)
# what a sign, a chart or a caption says in a clause: indique que la ville est Lyon
REPORTED = re.compile(r"\s*,?\s*(?:us |uns |nous |nos |ci )?(?:that|dass|que|che|dat)\b")
OPENING = re.compile(rf"^{THEREFORE}[,\uff0c:]?\s*", re.I)
UNSURE = re.compile(
    r"(?:\bnot|n't) (?:sure|certain|clear|possible|able)\b|\b(?:unclear|unsure|cannot|can't|unable|"
    r"could be|might be|may be|hard to|difficult to)\b|\bnicht sicher\b|\bpas s\u00fbr\b|\bno "
    r"estoy seguro\b|"
    r"不[确確]定|[无無]法",
    re.I,
)
# more about the same: It is parked next to a tree.
WHERE = re.compile(
    r"(?:it|this|they|he|she) (?:is|was|are|were) \w+(?:ed|ing|en|wn) (?:next|in|on|at|by|near|"
    r"under|behind|"
    r"with|along|beside|from|to|between|for)\b(?!.*\b(?:not|but|or)\b)",
    re.I,
)
SAME = dict.fromkeys("it this that these those they he she".split(), "it") | dict.fromkeys(
    (f"{this}{kind}" for this in ("", "this ") for kind in ("image", "picture", "photo", "figure")),
    "image",
)
LONGEST = 300  # characters of a sentence
# a sentence that ends in its conclusion
CONCLUDED = re.compile(
    r"[,;\uff0c]\s*(?:and )?(?=(?:so|therefore|thus|hence|donc|daher|deshalb|also|por lo tanto|"
    r"as\u00ed que|"
    r"portanto|quindi|dus)\b|\u6240\u4ee5|\u56e0\u6b64)",
    re.I,
)
MOST = 12  # verbs of a sentence, sentences of an answer


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, lines apart, without blank ones."""
    text = CONCLUDED.sub("\n", text)
    parts = (s.strip() for line in text.split("\n") for s in SENTENCE.split(line))
    return [part for part in parts if part]


@lru_cache(maxsize=4096)
def predicates(span: str) -> tuple[str, ...]:
    """Return the readings of the predicate in the last sentence of a short answer: unchanged, and
    without an article or a participle ("called", "taken in"); empty if it is denied or doubted, or
    another sentence contradicts it.

    Sentences after it may give reasons, as long as they have no such verb.
    """
    if len(span) > SHORT:
        return ()
    sentences = sentences_of(plain(span))
    if not 0 < len(sentences) <= MOST or UNSURE.search(span):
        return ()
    language = language_of(" ".join(sentences))
    verbs = SPEAKING[language]
    statements = [_statements(sentence, verbs) for sentence in sentences]
    last = len(statements) - 1
    while last and not _decides(sentences[last], verbs):
        last -= 1
    subjects = {_name(subject) for subject, _ in statements[last]}
    names = {_name(predicate) for _, predicate in statements[last]}
    earlier = [statement for spoken in statements[:last] for statement in spoken]
    concludes = OPENING.match(sentences[last])
    for subject, name in earlier if not concludes else ():
        rival = any(_rivals(name, final) for _, final in statements[last])
        if _name(name) not in names and (rival or _name(subject) in subjects):
            return ()
    return tuple(
        dict.fromkeys(way for _, predicate in statements[last] for way in _ways(predicate))
    )


def _rivals(first: str, second: str) -> bool:
    """Tell whether two short predicates may answer one question: both with an article or without
    ("a dog" and "a cat", "red" and "blue", but not "large" and "a dog")."""
    short = all(len(name.split()) <= 4 for name in (first, second))
    return short and bool(ARTICLES.match(first)) == bool(ARTICLES.match(second))


def _decides(sentence: str, verbs: re.Pattern[str]) -> bool:
    """Tell whether a sentence states or doubts something, not only why or where."""
    return not WHERE.match(sentence) and bool(verbs.search(sentence) or DOUBTS.search(sentence))


def _name(text: str) -> str:
    name = ARTICLES.sub("", bare(text).casefold(), count=1)
    return SAME.get(name, name)


def _statements(sentence: str, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return subject and predicate of a sentence, by its first verb and, if those before it stand
    in clauses, by its last."""
    if len(sentence) > LONGEST:
        return []
    sentence = bare(OPENING.sub("", bare(sentence)))
    if verb := pattern.search(sentence):
        head, tail = sentence[: verb.start()], sentence[verb.start() :]
        for aside in (BEHIND, CONTRAST, BEHIND):
            tail = bare(aside.sub("", tail))
        sentence = head + tail
    verbs = list(pattern.finditer(sentence))[: MOST + 1]
    contrast = None if verbs else CONTRAST.search(sentence)
    if contrast and contrast[0].startswith(","):  # a dog, not a cat
        alone = bare(sentence[: contrast.start()])
        return [] if DOUBTS.search(alone) else [("", alone)]
    alone = sentence if verbs else bare(BEHIND.sub("", CLOSING.sub("", sentence)))
    if alone != sentence:  # Asia, with 60 %
        return [] if DOUBTS.search(sentence) else [("", alone)]
    if sentence.endswith("?") or DOUBTS.search(sentence) or not 0 < len(verbs) <= MOST:
        return []
    chosen = verbs[:1]
    if verbs[1:] and all(
        verb[0] == ":"
        or CLAUSE.search(sentence[: verb.start()])
        or EVIDENT.match(sentence, verb.end())
        or REPORTED.match(sentence, verb.end())
        for verb in verbs[:-1]
    ):
        chosen = [verbs[0], verbs[-1]]
    spoken = []
    for verb in chosen:
        subject = sentence[: verb.start()].strip()
        predicate = bare(CLOSING.sub("", bare(sentence[verb.end() :].strip(" :"))))
        if predicate:
            spoken.append((subject, predicate))
    return spoken


def _ways(predicate: str) -> list[str]:
    ways = [predicate]
    for pattern in (ADVERB, PLACED, PARTICIPLE, ARTICLES):
        ways += [bare(pattern.sub("", way, count=1)) for way in ways if pattern.match(way)]
    return ways
