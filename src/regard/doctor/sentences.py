"""Generate parallel sentences in English, German and French, to measure how well the doctor finds planted faults."""

import random
from collections.abc import Sequence

Words = Sequence[tuple[str, str, str]]  # English, German, French

PEOPLE: Words = (
    ("the old teacher", "der alte Lehrer", "le vieux professeur"),
    ("my neighbour", "mein Nachbar", "mon voisin"),
    ("a young doctor", "eine junge Ärztin", "une jeune médecin"),
    ("the children", "die Kinder", "les enfants"),
    ("our friends from the village", "unsere Freunde aus dem Dorf", "nos amis du village"),
    ("the baker", "der Bäcker", "le boulanger"),
    ("two tired women", "zwei müde Frauen", "deux femmes fatiguées"),
    ("the mayor of the town", "der Bürgermeister der Stadt", "le maire de la ville"),
)
ACTIONS: Words = (
    ("bought a red bicycle", "kaufte ein rotes Fahrrad", "acheta un vélo rouge"),
    ("was looking for the lost key", "suchte den verlorenen Schlüssel", "cherchait la clé perdue"),
    (
        "sold the house with the large garden",
        "verkaufte das Haus mit dem großen Garten",
        "vendit la maison au grand jardin",
    ),
    ("read a book about the sea", "las ein Buch über das Meer", "lisait un livre sur la mer"),
    ("cooked soup", "kochte Suppe", "prépara une soupe"),
    ("forgot the tickets", "vergaß die Fahrkarten", "oublia les billets"),
    ("repaired the roof of the church", "reparierte das Dach der Kirche", "répara le toit de l'église"),
    ("waited for the last train", "wartete auf den letzten Zug", "attendait le dernier train"),
)
PLACES: Words = (
    ("in the market", "auf dem Markt", "au marché"),
    ("near the station", "in der Nähe des Bahnhofs", "près de la gare"),
    ("behind the new school", "hinter der neuen Schule", "derrière la nouvelle école"),
    ("at home", "zu Hause", "à la maison"),
    (
        "in a small village by the river",
        "in einem kleinen Dorf am Fluss",
        "dans un petit village près de la rivière",
    ),
)
TIMES: Words = (
    ("yesterday", "gestern", "hier"),
    ("on Monday morning", "am Montagmorgen", "lundi matin"),
    ("in the summer of {}", "im Sommer {}", "pendant l'été {}"),
    ("after {} days", "nach {} Tagen", "après {} jours"),
    ("before it began to rain", "bevor es zu regnen begann", "avant qu'il ne commence à pleuvoir"),
)
LINKS: Words = ((", and", ", und", ", et"), (", but", ", aber", ", mais"), (", while", ", während", ", tandis que"))


def sentences(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Return `count` different sentences, each in English, German and French."""
    rng = random.Random(f"sentences {seed}")
    found = dict[tuple[str, str, str], None]()
    while len(found) < count:
        found[_sentence(rng)] = None
    return list(found)


def _sentence(rng: random.Random) -> tuple[str, str, str]:
    clauses = [_clause(rng)]
    while rng.random() < 0.4 and len(clauses) < 4:
        clauses += [rng.choice(LINKS), _clause(rng)]
    parts = [
        "".join(("" if text.startswith(",") or not i else " ") + text for i, text in enumerate(side))
        for side in zip(*clauses, strict=True)
    ]
    mark = rng.choice("...!")
    english, german, french = (part[0].upper() + part[1:] + mark for part in parts)
    return english, german, french


def _clause(rng: random.Random) -> tuple[str, ...]:
    slots = [rng.choice(PEOPLE), rng.choice(ACTIONS)]
    slots += [rng.choice(places) for places in (PLACES, TIMES) if rng.random() < 0.6]
    number = str(rng.randrange(2, 2000))
    return tuple(" ".join(slot[side] for slot in slots).replace("{}", number) for side in range(3))
