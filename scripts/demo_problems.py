"""Arithmetic word problems in the style of GSM8K, generated from a seed, with worked solutions.

It knows eight kinds of story, how each is told, and the equations that solve it. A problem is held out from training
by a hash of its story and its chain of equations, so that no training problem asks for the same sums in the same
kind of story, whatever the names and objects in it. It does not know about tokens, models or files, and it does not
claim that a problem it makes is as hard, or as varied in its language, as one from GSM8K itself.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

END = "<|endoftext|>"
"""The token that ends a model's answer."""
EXAMPLE_SEPARATOR = "\n\n"
"""What parts solved examples in a prompt that has some: an empty line, as people write it."""
HELD_OUT_SHARE = 16
"""One chain of equations in this many is never trained on."""

PEOPLE: tuple[tuple[str, str], ...] = (
    ("Tom", "he"), ("Ana", "she"), ("Ben", "he"), ("Mia", "she"), ("Sam", "he"), ("Lily", "she"),
    ("Omar", "he"), ("Nina", "she"), ("Jack", "he"), ("Emma", "she"), ("Leo", "he"), ("Sara", "she"),
    ("Max", "he"), ("Zoe", "she"), ("Paul", "he"), ("Rosa", "she"), ("Wei", "he"), ("Mei", "she"),
    ("Ivan", "he"), ("Lucy", "she"), ("Noah", "he"), ("Ruth", "she"), ("Carl", "he"), ("Janet", "she"),
)  # fmt: skip
THINGS: tuple[str, ...] = (
    "apples", "pens", "marbles", "books", "stamps", "cards", "eggs", "shells",
    "cookies", "coins", "stickers", "oranges", "beads", "pencils", "toys", "muffins",
)  # fmt: skip
BOXES: tuple[str, ...] = ("boxes", "bags", "packs", "baskets", "jars")

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
FINAL_ANSWER = re.compile(r"#### (-?\d+)")


@dataclass(frozen=True)
class Problem:
    """One story with its worked solution."""

    story: str
    question: str
    solution: str
    answer: int

    @property
    def prompt(self) -> str:
        """What the model is given: it ends where the answer begins, and the answer begins with a space."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def completion(self) -> str:
        """What the model is to write, without its end-of-text token."""
        return f" {self.solution}\n#### {self.answer}"

    @property
    def chain(self) -> str:
        """The story and its equations, without names and objects: what the split is made on."""
        return self.story + "|" + "|".join("".join(found) for found in EQUATION.findall(self.solution))


class _Steps:
    """Writes equations and keeps the running result, so that text and numbers cannot disagree."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.value = 0

    def add(self, template: str, left: int, operator: str, right: int) -> int:
        """Solve one equation and write it where the template says ``{}``."""
        if operator == "/":
            assert left % right == 0, "stories are drawn so that shares come out even"
        results = {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}
        self.value = results[operator]
        self.sentences.append(template.format(f"{left} {operator} {right} = {self.value}"))
        return self.value

    def problem(self, story: str, question: str) -> Problem:
        """The finished problem; its answer is the last value written."""
        return Problem(story, question, " ".join(self.sentences), self.value)


def _two_people(rng: random.Random) -> tuple[str, str, str]:
    (first, pronoun), (second, _) = rng.sample(PEOPLE, 2)
    return first, pronoun, second


def _keeps(rng: random.Random) -> Problem:
    name, he, other = _two_people(rng)
    thing = rng.choice(THINGS)
    steps = _Steps()
    have = rng.randint(10, 60)
    told = [f"{name} has {have} {thing}."]
    for index in range(rng.choice((2, 3))):
        lead = f"{name} has" if index == 0 else f"Then {he} has"
        if rng.random() < 0.5 or have < 12:
            change = rng.randint(2, 40)
            verb = rng.choice(("buys {} more", "finds {} more", f"gets {{}} more from {other}"))
            have = steps.add(f"{lead} {{}} {thing}.", have, "+", change)
        else:
            change = rng.randint(2, have - 2)
            verb = rng.choice((f"gives {{}} to {other}", "loses {}", "sells {}"))
            have = steps.add(f"{lead} {{}} {thing}.", have, "-", change)
        told.append(f"{'Then ' + he if index else he.capitalize()} {verb.format(change)}.")
    ask = rng.choice((f"How many {thing} does {name} have now?", f"How many {thing} does {name} have in the end?"))
    return steps.problem("keeps", " ".join([*told, ask]))


def _shops(rng: random.Random) -> Problem:
    name, he, _ = _two_people(rng)
    first, second = rng.sample(THINGS, 2)
    count, price, other_count, other_price = (rng.randint(2, 9) for _ in range(4))
    steps = _Steps()
    cost = steps.add(f"The {first} cost {{}} dollars.", count, "*", price)
    other_cost = steps.add(f"The {second} cost {{}} dollars.", other_count, "*", other_price)
    total = steps.add("Together they cost {} dollars.", cost, "+", other_cost)
    told = rng.choice((
        f"{name} buys {count} {first} for {price} dollars each "
        f"and {other_count} {second} for {other_price} dollars each.",
        f"A shop sells {first} for {price} dollars and {second} for {other_price} dollars. "
        f"{name} buys {count} {first} and {other_count} {second}.",
    ))  # fmt: skip
    if rng.random() < 0.5:
        return steps.problem("shops", f"{told} How much does {name} pay?")
    paid = total + rng.randint(1, 50)
    steps.add(f"{he.capitalize()} gets {{}} dollars back.", paid, "-", total)
    return steps.problem("shops", f"{told} {he.capitalize()} pays with {paid} dollars. How much does {name} get back?")


def _compares(rng: random.Random) -> Problem:
    name, _, other = _two_people(rng)
    thing = rng.choice(THINGS)
    steps = _Steps()
    have = rng.randint(6, 45)
    kind = rng.choice(("more", "fewer", "times"))
    if kind == "more":
        change = rng.randint(2, 45)
        theirs = steps.add(f"{other} has {{}} {thing}.", have, "+", change)
    elif kind == "fewer":
        change = rng.randint(2, have - 2)
        theirs = steps.add(f"{other} has {{}} {thing}.", have, "-", change)
    else:
        change = rng.randint(2, 4)
        theirs = steps.add(f"{other} has {{}} {thing}.", have, "*", change)
    words = f"{change} times as many" if kind == "times" else f"{change} {kind}"
    than = "as" if kind == "times" else "than"
    told = f"{name} has {have} {thing}. {other} has {words} {than} {name}."
    together = steps.add(f"Together they have {{}} {thing}.", have, "+", theirs)
    if rng.random() < 0.5:
        return steps.problem("compares", f"{told} How many {thing} do they have together?")
    gone = rng.randint(2, together - 2)
    steps.add(f"They have {{}} {thing} left.", together, "-", gone)
    return steps.problem("compares", f"{told} They sell {gone} of them. How many {thing} are left?")


def _shares(rng: random.Random) -> Problem:
    name, he, _ = _two_people(rng)
    thing, box = rng.choice(THINGS), rng.choice(BOXES)
    friends = rng.randint(2, 9)
    each = rng.randint(3, 10)
    left = friends * each
    boxes, inside = rng.randint(2, 9), rng.randint(3, 12)
    steps = _Steps()
    total = steps.add(f"{name} has {{}} {thing}.", boxes, "*", inside)
    told = rng.choice((
        f"{name} has {boxes} {box} with {inside} {thing} each.",
        f"{name} buys {boxes} {box} of {thing}. There are {inside} {thing} in each.",
    ))  # fmt: skip
    if total > left:
        told += f" {he.capitalize()} keeps {total - left} and shares the rest equally among {friends} friends."
        steps.add(f"{he.capitalize()} shares {{}} {thing}.", total, "-", total - left)
    elif total < left:
        told += f" {he.capitalize()} gets {left - total} more and shares them equally among {friends} friends."
        steps.add(f"{he.capitalize()} shares {{}} {thing}.", total, "+", left - total)
    else:
        told += f" {he.capitalize()} shares them equally among {friends} friends."
    steps.add(f"Each friend gets {{}} {thing}.", left, "/", friends)
    return steps.problem("shares", f"{told} How many {thing} does each friend get?")


def _works(rng: random.Random) -> Problem:
    name, he, _ = _two_people(rng)
    wage, hours, more = rng.randint(5, 14), rng.randint(2, 6), rng.randint(2, 6)
    days = rng.sample(("Monday", "Tuesday", "Friday", "Sunday"), 2)
    steps = _Steps()
    worked = steps.add(f"{name} works {{}} hours.", hours, "+", more)
    earned = steps.add(f"{he.capitalize()} earns {{}} dollars.", worked, "*", wage)
    told = (
        f"{name} earns {wage} dollars an hour. {he.capitalize()} works {hours} hours on {days[0]} "
        f"and {more} hours on {days[1]}."
    )
    if rng.random() < 0.4:
        return steps.problem("works", f"{told} How much does {name} earn?")
    spent = rng.randint(5, earned - 5)
    steps.add(f"{he.capitalize()} has {{}} dollars left.", earned, "-", spent)
    return steps.problem("works", f"{told} {he.capitalize()} spends {spent} dollars. How much does {name} have left?")


def _reads(rng: random.Random) -> Problem:
    name, he, _ = _two_people(rng)
    pages, days, extra = rng.randint(5, 15), rng.randint(2, 7), rng.randint(3, 30)
    steps = _Steps()
    read = steps.add(f"{name} reads {{}} pages.", pages, "*", days)
    read = steps.add(f"In all {he} reads {{}} pages.", read, "+", extra)
    book = read + rng.randint(3, 50)
    steps.add("There are {} pages left.", book, "-", read)
    told = f"{name} reads {pages} pages a day for {days} days, and {extra} pages on the next day."
    ask = rng.choice((
        f"The book has {book} pages. {told} How many pages does {name} have left?",
        f"{told} The book has {book} pages. How many pages does {name} have left?",
    ))  # fmt: skip
    return steps.problem("reads", ask)


def _rides(rng: random.Random) -> Problem:
    steps = _Steps()
    vehicle = rng.choice(("bus", "train", "tram", "boat"))
    people = rng.randint(10, 70)
    told = [f"There are {people} people on a {vehicle}."]
    for index in range(rng.choice((1, 2))):
        off, on = rng.randint(2, people - 4), rng.randint(2, 40)
        stop = ("first", "second")[index]
        told.append(f"At the {stop} stop {off} people get off and {on} get on.")
        people = steps.add(f"After {off} get off there are {{}} people.", people, "-", off)
        people = steps.add(f"After {on} get on there are {{}} people.", people, "+", on)
    return steps.problem("rides", " ".join([*told, f"How many people are on the {vehicle} now?"]))


def _plants(rng: random.Random) -> Problem:
    name, he, _ = _two_people(rng)
    plant = rng.choice(("trees", "roses", "tulips", "bushes"))
    rows, each = rng.randint(3, 10), rng.randint(3, 10)
    steps = _Steps()
    total = steps.add(f"{name} plants {{}} {plant}.", rows, "*", each)
    told = f"{name} plants {rows} rows of {plant} with {each} {plant} in each row."
    lost = rng.randint(2, total - 2)
    alive = steps.add(f"There are {{}} {plant} left.", total, "-", lost)
    told += f" In winter {lost} of them die."
    if rng.random() < 0.4:
        return steps.problem("plants", f"{told} How many {plant} are left?")
    new = rng.randint(2, 40)
    steps.add(f"Now there are {{}} {plant}.", alive, "+", new)
    return steps.problem("plants", f"{told} In spring {he} plants {new} more. How many {plant} are there now?")


STORIES: tuple[Callable[[random.Random], Problem], ...] = (
    _keeps, _shops, _compares, _shares, _works, _reads, _rides, _plants,
)  # fmt: skip


def is_held_out(problem: Problem) -> bool:
    """Whether the problem's chain of equations is one of those that training never sees."""
    digest = hashlib.sha256(problem.chain.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def generate(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Problems without end, the same ones for the same seed, from one side of the split."""
    rng = random.Random(seed)
    while True:
        problem = rng.choice(STORIES)(rng)
        if is_held_out(problem) == held_out:
            yield problem


def final_answer(completion: str) -> int | None:
    """The number after the last ``####`` of a completion, or nothing when it has none."""
    found = FINAL_ANSWER.findall(completion)
    return int(found[-1]) if found else None
