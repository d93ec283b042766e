"""Holds the vocabulary of generated GenEval and OCR prompts."""

from __future__ import annotations

COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
RELATIONS = ("left of", "right of", "above", "below")
# surfaces of the writing; {text} is the writing in double quotes
SURFACES = tuple(
    "a sign that says {text}|a chalkboard menu that reads {text}|a neon sign that says {text}|"
    "a coffee mug printed with the words {text}|a book cover titled {text}|"
    "a street banner with the words {text}|a birthday cake with {text} written in icing|"
    "a ticket stub printed with {text}|a wooden plank carved with {text}|"
    "a shop window lettered {text}|a T-shirt with the slogan {text}|a road sign that reads {text}|"
    "a handwritten note that says {text}|a brass plaque engraved with {text}|"
    "a movie poster with the title {text}|a label on a jar that says {text}".split("|")
)
SETTINGS = tuple(
    "in the rain at night|on a busy street|in soft morning light|beside a window|in an old library|"
    "at a country fair|on a snowy hill|in a quiet kitchen|on a sandy beach|in a neon-lit alley|"
    "at a railway station|in a garden full of flowers".split("|")
)
# a line of writing is an opening and an ending
OPENINGS = tuple(
    "Open,Closed,Fresh,Slow,Last,First,Lost,Silver,Golden,Hidden,Quiet,Midnight,Summer,Winter,"
    "Welcome,Future,Secret,Lucky,Brave,Electric,Grand,Little,Northern,Happy,Urgent,Daily,Wild,"
    "Cosmic,Broken,Royal".split(",")
)
ENDINGS = tuple(
    "Bread,Coffee,Harbor,Garden,Street,Station,Letters,Music,Dreams,Bicycle,Lantern,Market,Tower,"
    "River,Island,Kitchen,Signals,Journey,Library,Sale,Parade,Exit,Voyage,Bridge,Theatre,Meadow,"
    "Clockwork,Museum,Planet,Horizon".split(",")
)
