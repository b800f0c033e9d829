"""The scenes and sentences of the word problems: data, and the few words that say how to read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Operation(Enum):
    """What a sentence does to the quantity."""

    GAIN = auto()
    LOSE = auto()
    TIMES = auto()
    SHARE = auto()
    HALVE = auto()


@dataclass(frozen=True)
class Frame:
    """A scene: the things in it and the sentences that may be told about them.

    Sentences are templates without their full stop; {n} is the sentence's number ("2 times" is written "twice"), {he}, {him} and
    {his} stand for the person's pronouns. The worked solution repeats a sentence up to its "|", if it has one, with the objects left
    out.
    """

    objects: tuple[str, ...]
    opening: tuple[str, ...]
    groups: str
    """An opening that takes a step: {n} things in each of {groups} groups."""
    gain: tuple[str, ...]
    lose: tuple[str, ...]
    times: tuple[str, ...]
    share: tuple[str, ...]
    halve: tuple[str, ...]
    question: tuple[str, ...]
    compare: tuple[str, str] | None = ("has", "have")
    """The verb that compares two people, for one and for both; None where such a story makes no sense."""

    def sentences(self, operation: Operation) -> tuple[str, ...]:
        return {
            Operation.GAIN: self.gain,
            Operation.LOSE: self.lose,
            Operation.TIMES: self.times,
            Operation.SHARE: self.share,
            Operation.HALVE: self.halve,
        }[operation]


BOYS = ("Tom", "Ben", "Sam", "Leo", "Max", "Jack", "Paul", "Omar", "Ivan", "Luis", "Adam", "Noah")
GIRLS = ("Mia", "Anna", "Lucy", "Emma", "Zoe", "Sara", "Nina", "Rosa", "Kate", "Lily", "Aisha", "Mary")
HIS = {"he": "he", "He": "He", "him": "him", "his": "his", "His": "His"}
HER = {"he": "she", "He": "She", "him": "her", "his": "her", "His": "Her"}

HAVE_NOW = ("How many {objects} does {he} have now?", "How many {objects} does {name} have in the end?")
ARE_LEFT = ("How many {objects} are there now?", "How many {objects} are there in the end?")

FRAMES = (
    Frame(
        objects=("stamps", "coins", "shells", "stickers"),
        opening=("{name} has {n} {objects} in a box", "{name} owns {n} {objects}", "{name} starts a collection with {n} {objects}"),
        groups="{name} has {groups} boxes with {n} {objects} each",
        gain=("{He} finds {n} more {objects}", "A friend gives {him} {n} {objects}", "{He} buys {n} more {objects}"),
        lose=("{He} loses {n} {objects}", "{He} gives {n} {objects} to a friend", "{He} sells {n} {objects}"),
        times=("A year later {he} has {n} times as many {objects}", "Soon {he} owns {n} times as many {objects}"),
        share=(
            "{He} puts the {objects} into {n} equal piles| and keeps only one pile",
            "{He} divides the {objects} into {n} equal shares| and keeps one share",
        ),
        halve=("{He} gives half of the {objects} to {his} sister", "{He} sells half of the {objects}"),
        question=HAVE_NOW,
    ),
    Frame(
        objects=("marbles", "cards"),
        opening=("{name} begins a game with {n} {objects}", "{name} brings {n} {objects} to a game"),
        groups="{name} begins a game with {groups} bags of {n} {objects}",
        gain=("{He} wins {n} {objects}", "In the next round {he} wins {n} more {objects}", "{He} gets {n} {objects} from {his} brother"),
        lose=("{He} loses {n} {objects}", "In the next round {he} loses {n} {objects}", "{He} trades {n} {objects} for a toy"),
        times=("After a lucky round {he} has {n} times as many {objects}", "With a trick {he} gets {n} times as many {objects}"),
        share=(
            "{He} splits the {objects} into {n} equal piles| and plays on with one pile",
            "{He} shares the {objects} equally with {n} players in all",
        ),
        halve=("{He} loses half of the {objects}", "{He} gives half of the {objects} to {his} brother"),
        question=HAVE_NOW,
    ),
    Frame(
        objects=("pens", "cups", "hats", "lamps"),
        opening=("{name} has {n} {objects} in {his} shop", "{name} opens a shop with {n} {objects}"),
        groups="{name} opens a shop with {groups} shelves of {n} {objects} each",
        gain=("{He} orders {n} more {objects}", "A truck brings {n} {objects}", "{He} buys {n} more {objects}"),
        lose=("{He} sells {n} {objects}", "A customer buys {n} {objects}", "{He} sends {n} {objects} back"),
        times=("For a big sale {he} gets {n} times as many {objects}", "Next week {he} has {n} times as many {objects}"),
        share=(
            "{He} packs the {objects} into {n} equal boxes| and keeps only one box",
            "{He} splits the {objects} equally between {n} shops| and counts one shop",
        ),
        halve=("{He} sells half of the {objects}", "A customer buys half of the {objects}"),
        question=("How many {objects} does {he} have now?", "How many {objects} are in the shop now?"),
    ),
    Frame(
        objects=("apples", "pears", "plums"),
        opening=("{name} picks {n} {objects} in the orchard", "{name} carries {n} {objects} home from the orchard"),
        groups="{name} fills {groups} baskets with {n} {objects} each",
        gain=("{He} picks {n} more {objects}", "From the next tree {he} gets {n} {objects}", "{His} father brings {n} more {objects}"),
        lose=("{He} eats {n} {objects}", "{He} uses {n} {objects} for juice", "{He} sells {n} {objects} at the market"),
        times=("By night {he} has {n} times as many {objects}", "With some help {he} gets {n} times as many {objects}"),
        share=(
            "{He} puts the {objects} into {n} equal baskets| and takes one basket home",
            "{He} divides the {objects} into {n} equal shares| and keeps one share",
        ),
        halve=("{He} uses half of the {objects} for a pie", "{He} sells half of the {objects} at the market"),
        question=HAVE_NOW,
    ),
    Frame(
        objects=("books", "maps"),
        opening=("{name} works in a library with {n} {objects}", "{name} cares for {n} {objects} in a library"),
        groups="{name} works in a library that has {groups} shelves with {n} {objects} each",
        gain=("The library buys {n} more {objects}", "Readers bring back {n} {objects}", "A school gives {n} {objects} to the library"),
        lose=("Readers borrow {n} {objects}", "{He} throws away {n} {objects}", "A school borrows {n} {objects}"),
        times=("The next year there are {n} times as many {objects}", "Soon the library has {n} times as many {objects}"),
        share=(
            "{He} splits the {objects} equally between {n} rooms| and counts one room",
            "{He} packs the {objects} into {n} equal boxes| and keeps only one box",
        ),
        halve=("Readers borrow half of the {objects}", "{He} sends half of the {objects} to a school"),
        question=ARE_LEFT,
        compare=None,
    ),
    Frame(
        objects=("passengers", "children", "people"),
        opening=("{name} drives a bus with {n} {objects}", "{name} begins the day with {n} {objects} on {his} bus"),
        groups="{name} drives a bus with {groups} rows of {n} {objects} each",
        gain=("At the next stop {n} {objects} get on", "At the station {n} more {objects} get on", "In the city {n} {objects} join"),
        lose=("At the next stop {n} {objects} get off", "At the school {n} {objects} leave", "At the park {n} {objects} get off"),
        times=("After the station there are {n} times as many {objects}", "By noon {he} drives {n} times as many {objects}"),
        share=(
            "At noon {he} splits the {objects} equally between {n} buses| and drives one bus",
            "At the station {he} divides the {objects} into {n} equal groups| and takes one group",
        ),
        halve=("At the park half of the {objects} get off", "In the city half of the {objects} leave"),
        question=("How many {objects} are on the bus now?", "How many {objects} are there in the end?"),
        compare=None,
    ),
    Frame(
        objects=("cookies", "cakes", "rolls"),
        opening=("{name} bakes {n} {objects}", "{name} makes {n} {objects} for a party"),
        groups="{name} bakes {groups} trays of {n} {objects}",
        gain=("{He} bakes {n} more {objects}", "{His} mother brings {n} {objects}", "From the shop {he} gets {n} more {objects}"),
        lose=("{He} eats {n} {objects}", "{His} friends eat {n} {objects}", "{He} burns {n} {objects}"),
        times=("With a bigger recipe {he} makes {n} times as many {objects}", "By night {he} has {n} times as many {objects}"),
        share=(
            "{He} puts the {objects} onto {n} equal plates| and keeps one plate",
            "{He} divides the {objects} into {n} equal shares| and keeps one share",
        ),
        halve=("{His} friends eat half of the {objects}", "{He} takes half of the {objects} to school"),
        question=HAVE_NOW,
    ),
    Frame(
        objects=("hens", "goats", "ducks", "cows"),
        opening=("{name} has {n} {objects} on {his} farm", "{name} keeps {n} {objects}"),
        groups="{name} has {groups} barns with {n} {objects} each",
        gain=("{He} buys {n} more {objects}", "In spring {n} {objects} are born", "A farmer gives {him} {n} {objects}"),
        lose=("{He} sells {n} {objects}", "In the night {n} {objects} run away", "{He} gives {n} {objects} to a farmer"),
        times=("A year later there are {n} times as many {objects}", "In spring {he} has {n} times as many {objects}"),
        share=(
            "{He} splits the {objects} equally between {n} fields| and counts one field",
            "{He} divides the {objects} into {n} equal groups| and keeps one group",
        ),
        halve=("{He} sells half of the {objects}", "In the night half of the {objects} run away"),
        question=("How many {objects} does {he} have now?", "How many {objects} are there now?"),
    ),
    Frame(
        objects=("laps", "miles"),
        opening=("{name} plans to swim {n} {objects}", "{name} wants to swim {n} {objects} this week"),
        groups="{name} plans to swim {n} {objects} on each of {groups} days",
        gain=("{His} teacher adds {n} {objects}", "For a race {he} adds {n} more {objects}", "A friend asks for {n} more {objects}"),
        lose=("{He} drops {n} {objects} to rest", "{His} teacher takes away {n} {objects}", "For lack of time {he} skips {n} {objects}"),
        times=("With more time {he} plans {n} times as many {objects}", "{His} teacher asks for {n} times as many {objects}"),
        share=(
            "{He} splits the {objects} equally over {n} days| and looks at one day",
            "{He} divides the {objects} into {n} equal parts| and keeps one part",
        ),
        halve=("{He} drops half of the {objects} to rest", "{His} teacher takes away half of the {objects}"),
        question=("How many {objects} does {he} plan now?", "How many {objects} does {name} plan in the end?"),
        compare=("plans", "plan"),
    ),
    Frame(
        objects=("roses", "trees", "flowers"),
        opening=("{name} plants {n} {objects} in {his} garden", "{name} has {n} {objects} in {his} garden"),
        groups="{name} plants {groups} rows of {n} {objects}",
        gain=("{He} plants {n} more {objects}", "In spring {n} more {objects} grow", "{His} mother plants {n} {objects}"),
        lose=("A storm breaks {n} {objects}", "{He} cuts down {n} {objects}", "In winter {n} {objects} die"),
        times=("A year later there are {n} times as many {objects}", "In the summer {he} has {n} times as many {objects}"),
        share=(
            "A wall splits the {objects} equally into {n} gardens| and {he} keeps one garden",
            "{He} divides the {objects} into {n} equal rows| and keeps one row",
        ),
        halve=("A storm breaks half of the {objects}", "{He} cuts down half of the {objects}"),
        question=("How many {objects} does {he} have now?", "How many {objects} are in the garden now?"),
    ),
    Frame(
        objects=("chairs", "pencils"),
        opening=("{name} counts {n} {objects} in the school", "{name} puts {n} {objects} into a room"),
        groups="{name} counts {groups} rooms with {n} {objects} each",
        gain=("The school buys {n} more {objects}", "A teacher brings {n} {objects}", "{He} finds {n} more {objects}"),
        lose=("A teacher takes {n} {objects}", "{He} throws away {n} {objects}", "{His} friends break {n} {objects}"),
        times=("The next year there are {n} times as many {objects}", "For a big test {he} gets {n} times as many {objects}"),
        share=(
            "{He} splits the {objects} equally between {n} rooms| and counts one room",
            "{He} puts the {objects} into {n} equal rows| and counts one row",
        ),
        halve=("A teacher takes half of the {objects}", "{He} sends half of the {objects} to a library"),
        question=ARE_LEFT,
        compare=None,
    ),
    Frame(
        objects=("dollars",),
        opening=("{name} has {n} {objects} in the bank", "{name} saves {n} {objects}", "{name} gets {n} {objects} on {his} birthday"),
        groups="{name} saves {n} {objects} in each of {groups} weeks",
        gain=("{He} earns {n} {objects}", "{His} father gives {him} {n} {objects}", "{He} saves {n} more {objects}"),
        lose=("{He} spends {n} {objects}", "{He} pays {n} {objects} for a toy", "{He} gives {n} {objects} to {his} sister"),
        times=("A year later {he} has {n} times as many {objects}", "With a new job {he} has {n} times as many {objects}"),
        share=(
            "{He} splits the {objects} equally over {n} weeks| and spends all but one part",
            "{He} divides the {objects} into {n} equal shares| and keeps one share",
        ),
        halve=("{He} spends half of the {objects}", "{He} pays half of the {objects} for a bike"),
        question=HAVE_NOW,
    ),
)

COMPARISONS = {
    Operation.GAIN: "Now {other} {has} {n} more {objects} than {name}",
    Operation.LOSE: "Now {other} {has} {n} fewer {objects} than {name}",
    Operation.TIMES: "Now {other} {has} {n} times as many {objects} as {name}",
    Operation.HALVE: "Now {other} {has} half as many {objects} as {name}",
}
TOGETHER = "How many {objects} do {name} and {other} {have} together?"
