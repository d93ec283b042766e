"""Captions of the words world, and the data source ``words``.

A Prompt describes a picture::

    {"text": 'the word "river" in blue', "words": "river", "color": "blue", "ground": None}

``None`` means "not specified". ``mmrl.worlds.words.lettering`` draws it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from samplers.noise import Rng

WORDS = tuple(
    """
    able acorn actor adult after agent air album alive alone amber angel ankle apple april apron
    arch area arm army arrow art ash aunt autumn award baby back bacon badge bag baker ball bamboo
    banana band bank barn basket bath beach bean bear beast bed bee beetle bell belt bench berry
    best big bike bird birth black blade blue board boat body bone book boot border bottle bowl box
    boy branch brave bread break brick bridge bright broom brown brush bubble bucket bug build bull
    bunny burn bus bush busy butter button cabin cable cactus cage cake calm camel camp can candle
    candy canoe cap car card carpet carrot cart castle cat cave chain chair chalk cheese cherry
    chess chest chick child chin church circle city clay clean clear cliff clock close cloth cloud
    clown club coach coal coast coat cocoa coffee coin cold color comb come cook cool copper coral
    corn cotton couch cough count cousin cow crab crane crate cream creek crow crowd crown cry cup
    curve dance danger dark data dawn day deep deer desk dinner dirt dish doctor dog doll donkey
    door dove down dragon drama dream dress drink drive drop drum dry duck dust duty eagle ear early
    earth east easy eat echo edge egg eight elbow elder empty engine enter event exit eye fable face
    fact fair family famous fan farm fast father fault fear fence fern field fig film final find
    finger fire fish five flag flame flat floor flour flower fly foam fog food foot forest fork fort
    four fox frame fresh friend frog front frost fruit full fun future galaxy game garage garden
    garlic gas gate gift ginger girl glad glass globe glove glue goal goat gold good goose grain
    grape grass gray great green grid ground group guard guest guide guitar gum habit hair half hall
    ham hammer hand happy hard hat hawk head heart heat heavy hedge hello help hen hero hill hip
    hobby holy home honey hook hope horn horse hotel hour house hug human hut ice idea inch ink
    insect iron island ivory ivy jacket jam jar jazz jeans jelly jewel job join joke jolly joy judge
    juice jump jungle junior kettle key kick kid kind king kiss kite kitten knee knife knot koala
    label lace ladder lady lake lamb lamp land lane laptop large laser last late laugh lava law lazy
    leaf learn left leg lemon letter level light lily lime line lion lip list little lizard local
    lock log long loop lost loud love low lucky lunch lung magic magnet mail main major man mango
    map maple marble march market mask match meal meat medal melon member menu metal mice middle
    milk mind mine mint mirror mix model moment money monkey month moon moss moth mother motor
    mountain mouse mouth movie mud mug music nail name nap narrow nature navy neck needle nest net
    never new news nice night nine noble noise north nose note novel number nurse nut oak oasis
    ocean office oil old olive onion open opera orange orbit order organ oval oven owl oxygen page
    paint pair palm panda paper park party pasta path pause peace peach pear pearl pen pencil pepper
    person phone photo piano picnic piece pig pilot pine pink pipe pirate pizza place plan planet
    plant plate play plum pocket poem poet point polar police pond pony pool poppy porch port post
    potato power prize proud public puddle pulse pump puppy purple puzzle quail queen quick quiet
    quilt rabbit race radio rain ramp ranch rapid rat raven ready red remote rescue rest ribbon rice
    rich ride right ring ripple river road robin robot rock roof room root rope rose round royal
    rubber ruby rug ruler run rush sail salad salt sand sauce scale school score sea seal season
    seat second secret seed seven shade shadow shape shark sheep sheet shelf shell ship shirt shoe
    shop shore short shower sign silk silver simple singer six size skate ski skin sky sleep slow
    small smart smile smoke snack snail snake snow soap sock sofa soft soil solar song soup south
    space spark speed spice spider spoon spring square stable stage stair stamp star start station
    steam steel stem step stone stop storm story stove straw street strong studio sugar suit summer
    sun super surf swan sweet swim sword table tail talent tall tank taxi tea teach team tent test
    theory thick thin thing three throne thumb ticket tide tiger time tiny tire toast today toe
    tomato tool tooth top torch total tower town toy track train trash travel tray tree trick trip
    truck trust tulip tuna tunnel turtle twelve twig twin two uncle under union unit up urban useful
    valley van vase velvet view violet violin visit voice volcano wagon walk wall walnut war warm
    wash water wave wax way wealth weather web week west whale wheat wheel white wide wild wind
    window wine wing winter wise wish wolf woman wood wool word work world worm yard year yellow yes
    yoga young youth zebra zero zone zoo
    """.split()
)
COLORS = {
    "red": (0.85, 0.12, 0.12),
    "green": (0.05, 0.55, 0.15),
    "blue": (0.12, 0.25, 0.9),
    "yellow": (0.98, 0.85, 0.15),
    "white": (1.0, 1.0, 1.0),
    "black": (0.05, 0.05, 0.05),
}
GROUNDS = {  # and the colours that can be read on them
    "paper": ("red", "green", "blue", "black"),
    "wood": ("yellow", "white", "black"),
    "brick": ("yellow", "white"),
    "grass": ("yellow", "white"),
}
LONGEST = 12  # letters and spaces of a picture
HELD_OUT = 4  # every fourth word, by its hash
Kind = Literal["single", "pairs", "triples", "mixed"]
COUNT: dict[Kind, int] = {"single": 1, "pairs": 2, "triples": 3}


def is_held_out(word: str) -> bool:
    """Tell whether a word belongs to a fixed fourth of all words, by hash: no training sees it, not
    even the base model's."""
    digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def caption(words: str, color: str | None, ground: str | None, form: float) -> Prompt:
    """Describe a picture; ``form`` in 0..1 chooses how. A sign has capitals."""
    sign = form < 0.5
    words = words.upper() if sign else words
    several = "s" if " " in words else ""
    text = f'a sign that says "{words}"' if sign else f'the word{several} "{words}"'
    text += f" in {color}" if color else ""
    text += f" on {ground}" if ground else ""
    return {"text": text, "words": words, "color": color, "ground": ground}


def captions(kind: Kind, count: int, held_out: bool, seed: int = 0) -> list[Prompt]:
    """Draw ``count`` captions of a kind; no two name the same words.

    ``mixed``: one, two and three words in equal parts. A caption of held-out words has no other
    word.
    """
    rng = Rng.of(seed, "words", kind, held_out)
    if kind == "mixed":
        kinds: tuple[Kind, ...] = ("single", "pairs", "triples")
        return [p for i, k in enumerate(kinds) for p in captions(k, (count + i) // 3, held_out)]
    texts = _texts(COUNT[kind], [w for w in WORDS if is_held_out(w) == held_out], count, rng)
    rows = rng.fold("style").uniform(rng.rows(len(texts), 1), (3,)).tolist()
    return [styled(text, *row) for text, row in zip(texts, rows, strict=True)]


def styled(words: str, form: float, color: float, ground: float) -> Prompt:
    """Caption words; the numbers in 0..1 choose its form, and for half of the captions a colour,
    for half a ground."""
    grounds = [*GROUNDS, *[None] * len(GROUNDS)]
    chosen = grounds[int(ground * len(grounds))]
    colors = list(COLORS if chosen is None else GROUNDS[chosen])
    either = [*colors, *[None] * len(colors)]
    return caption(words, either[int(color * len(either))], chosen, form)


def _texts(number: int, words: list[str], count: int, rng: Rng) -> list[str]:
    """Draw at most ``count`` texts of ``number`` words that fit a picture, without repetition;
    single words in a random order."""
    if number == 1:
        fit = [word for word in words if len(word) <= LONGEST]
        return [fit[i] for i in rng.permutation(len(fit)).tolist()][:count]
    short = [word for word in words if len(word) <= LONGEST // number + 1]
    texts: dict[str, None] = {}
    for step in range(100):  # then all that there are, nearly
        for row in rng.uniform(rng.rows(4 * count, 1), (number,), step).tolist():
            text = " ".join(short[int(x * len(short))] for x in row)
            if len(text) <= LONGEST and len(set(text.split())) == number:
                texts.setdefault(text)
        if len(texts) >= count:
            break
    return list(texts)[:count]


@DATA.register("words")
class Words:
    """Draw captions of pictures of words, such as ``a sign that says "river" in blue``.

    Words of training, development and test are apart: a fourth of the words is held out.

    kind: how many words: single, pairs, triples or mixed. captions: to train on. held_out: to
    evaluate with. seed: of all choices.
    """

    fields = ("text", "words", "color", "ground")  # of every prompt
    train: list[Prompt]
    held_out: list[Prompt]

    def __init__(
        self, kind: Kind = "single", captions: int = 480, held_out: int = 160, seed: int = 0
    ):
        if min(captions, held_out) < 20:
            raise UserError(
                f"data.words.captions is {captions} and held_out {held_out}: at least 20 each"
            )
        self.train = _captions(kind, captions, False, seed)
        self.held_out = _captions(kind, held_out, True, seed)
        for name, count, drawn in (
            ("captions", captions, self.train),
            ("held_out", held_out, self.held_out),
        ):
            if len(drawn) < count:
                raise UserError(
                    f"data.words.{name} is {count}: of the kind {kind} only {len(drawn)} were found"
                )


_captions = captions  # the option of that name hides it
