"""The phrasings of the word problems.

A program is one to three steps over the numbers of the text, called v to z. The results of the steps are a, b and c.
"""

from typing import NamedTuple


class Template(NamedTuple):
    """A phrasing, its program, and the unit that follows each result in the working."""

    text: str
    program: str
    unit: str = "{o}"


ONE_STEP = (
    Template("{A} has {x} {o} and [finds|buys|gets] {y} more. How many {o} does {A} have now?", "x+y"),
    Template("{A} picked {x} {o} and {B} picked {y}. How many did they pick [together|in all]?", "x+y"),
    Template("There are {x} {o} [at|near] the {place} and {y} at home. How many are there in total?", "x+y"),
    Template("{A} gave away {x} {o} and still has {y}. How many {o} did {A} have [before|at first]?", "x+y"),
    Template("{A} had {x} {o} and [gave|sold|lent] {y} of them to {B}. How many {o} are left?", "x-y"),
    Template("{A} has {x} {o}. {B} has {y} fewer. How many {o} does {B} have?", "x-y"),
    Template("{A} wants {x} {o} but has only {y}. How many more does {A} need?", "x-y"),
    Template("A box held {x} {o}. Now {y} are left. How many were taken [out|away]?", "x-y"),
    Template("{A} buys {x} [packs|bags] of {y} {o}. How many {o} is that?", "x*y"),
    Template("Each of {x} [children|friends] has {y} {o}. How many {o} do they have?", "x*y"),
    Template("One of the {o} costs {x} dollars. How much do {y} cost?", "x*y", "dollars"),
    Template("{A} reads {x} pages a day. How many pages does {A} read in {y} days?", "x*y", "pages"),
    Template("{A} shares {x} {o} [equally|evenly] among {y} friends. How many does each get?", "x/y"),
    Template("{A} packs {x} {o} into bags of {y}. How many are needed?", "x/y", "bags"),
    Template("{y} tickets for the {place} cost {x} dollars. What does one cost?", "x/y", "dollars"),
    Template("{A} walks {y} miles a day. How many days does {A} need for {x} miles?", "x/y", "days"),
)

TWO_STEPS = (
    Template("{A} had {x} {o}, [found|bought] {y} more and gave {z} to {B}. How many are left?", "x+y a-z"),
    Template("{A} had {x} {o}, lost {y} and then [found|got] {z}. How many {o} does {A} have now?", "x-y a+z"),
    Template("{A} has {x} {o}. {B} has {y} more than {A}. How many do they have together?", "x+y x+a"),
    Template("{A} has {x} {o}. {B} has {y} fewer than {A}. How many do they have together?", "x-y x+a"),
    Template("{A} buys {x} bags of {y} {o} and gives away {z}. How many are left?", "x*y a-z"),
    Template("{A} has {z} {o} and buys {x} [bags|packs] of {y}. How many {o} is that in all?", "x*y z+a"),
    Template("{A} and {B} put {x} and {y} {o} together and share them among {z} friends. How many each?", "x+y a/z"),
    Template("{A} had {x} {o}, ate {y} and put the rest into {z} [bags|boxes]. How many in each?", "x-y a/z"),
    Template("{A} shares {x} {o} among {y} friends. {B}, one of them, had {z}. How many has {B} now?", "x/y a+z"),
    Template("{A} packs {x} {o} into {y} boxes and takes {z} out of one. How many stay in that box?", "x/y a-z"),
    Template("{A} earns {x} dollars an hour for {y} hours and spends {z}. How much is left?", "x*y a-z", "dollars"),
    Template("{A} buys {x} {o} for {y} dollars each and pays {z} for a bag. What is the total?", "x*y a+z", "dollars"),
    Template(
        "{A} pays with {z} dollars for {x} {o} at {y} dollars each. How much change is due?", "x*y z-a", "dollars"
    ),
    Template("{x} {o} cost {y} dollars. How much do {z} {o} cost?", "y/x a*z", "dollars"),
    Template(
        "At the {place} {x} people got on a bus with {y}, then {z} got off. How many are on it?", "y+x a-z", "people"
    ),
    Template("A book has {x} pages. {A} read {y} today and {z} yesterday. How many are left?", "y+z x-a", "pages"),
    Template("{A} has {x} {o}, {y} are red, {z} are blue, the rest green. How many are green?", "x-y a-z"),
    Template("{A} saves {x} dollars a week. A ticket costs {z} and {A} has {y}. How many weeks?", "z-y a/x", "weeks"),
    Template("{A} is {x}. {B} is {y} times as old. How old is {B} in {z} years?", "x*y a+z", "years"),
    Template("{A} is {x} and {B} is {y} years older. How old are they together?", "x+y x+a", "years"),
    Template("There are {x} rows of {y} {o}, but {z} are broken. How many are whole?", "x*y a-z"),
    Template("{A} has {x} {o}, {B} has {y}. {B} then [wins|gets] {z}. How many more than {A} has {B}?", "y+z a-x"),
)

THREE_STEPS = (
    Template("{A} buys {w} bags of {x} {o}, eats {y} and gives {z} to {B}. How many are left?", "w*x a-y b-z"),
    Template("{A} has {w} {o}, gets {x}, loses {y} and buys {z}. How many {o} does {A} have?", "w+x a-y b+z"),
    Template("{A} has {w} {o}, gives {x} to {B} and {y} to {C}, then finds {z}. How many now?", "w-x a-y b+z"),
    Template("{A} buys {w} packs of {x} {o} and {y} packs of {z}. How many {o} is that?", "w*x y*z a+b"),
    Template("{A} sells {w} {o} at {x} dollars and {y} {p} at {z}. How much is that?", "w*x y*z a+b", "dollars"),
    Template("{A} had {w} {o}, got {x}, ate {y} and shared the rest among {z} friends. How many each?", "w+x a-y b/z"),
    Template(
        "{A} has {x} {o}, {B} has {y} more and {C} has {z} fewer than {B}. How many has {C}, with {w} new ones?",
        "x+y a-z b+w",
    ),
    Template(
        "{A} had {w} dollars, bought {x} {o} at {y} and then earned {z}. How much is there now?",
        "x*y w-a b+z",
        "dollars",
    ),
    Template("{w} {o} fill {x} boxes. {A} has {y} boxes and {z} loose. How many {o} has {A}?", "w/x a*y b+z"),
    Template(
        "{A} works {w} hours for {x} dollars, {B} {y} hours for {z}. How much more has {A}?", "w*x y*z a-b", "dollars"
    ),
    Template(
        "{A} picks {w} {o} and {B} {x}. They sell {y} and put the rest in {z} bags. How many in each?", "w+x a-y b/z"
    ),
    Template("{A} had {w} {o}, {B} had {x} and {C} {y}. They lost {z}. How many are left?", "w+x a+y b-z"),
)

TEMPLATES = ONE_STEP + TWO_STEPS + THREE_STEPS
