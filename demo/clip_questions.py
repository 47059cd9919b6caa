"""Questions about a clip, with true answers: what happens, to what, which way, when, in what order.

Every `ask_*` returns a turn, or None where the clip does not support the question. `where` is ""
or " in the clip".
"""

from __future__ import annotations

from dataclasses import replace

from demo.clips import DIRECTIONS, Clip, Event, scene_at
from demo.dice import Dice
from demo.questions import (
    ask_cell,
    ask_colour,
    ask_count,
    ask_describe,
    ask_exists,
    ask_list,
    ask_place,
    ask_shape,
)
from demo.scenes import COLOURS, Scene, Thing
from demo.wording import Turn, counted, listing, name, refs_to, sentence, with_article

VERBS = {  # one does, many do
    "move": ("moves", "move"),
    "appear": ("appears", "appear"),
    "vanish": ("disappears", "disappear"),
    "turn": ("changes colour", "change colour"),
}
_ASKED = {  # other words for "what moves" and "does it move"
    "move": ("move",),
    "appear": ("appear", "appear", "show up"),
    "vanish": ("disappear", "disappear", "vanish", "go away"),
    "turn": ("change colour", "change colour", "change its colour"),
}


def _cast(clip: Clip) -> Scene:
    """All things that take part, as they are called at first."""
    return Scene(clip.width, clip.height, clip.background, clip.things)


def _noun(dice: Dice, clip: Clip, thing: Thing) -> str:
    """A name for one thing, which fits no other: by colour and shape, or by shape alone."""
    refs = [ref for ref in refs_to(_cast(clip), thing) if ref.shape is not None]
    return f"the {refs[0] if dice.chance(0.6) else dice.pick(refs)}"


def _predicate(event: Event) -> str:
    if event.kind == "move":
        return f"moves {event.direction}"
    return f"turns {event.colour}" if event.kind == "turn" else VERBS[event.kind][0]


def _plain(event: Event) -> str:
    """The verb as it follows "does"."""
    if event.kind == "move":
        return f"move {event.direction}"
    return f"turn {event.colour}" if event.kind == "turn" else VERBS[event.kind][1]


def _clause(clip: Clip, event: Event) -> str:
    """The event in words: "the red star moves left"."""
    noun = name(clip.things[event.thing])
    article = with_article(noun) if event.kind == "appear" else f"the {noun}"
    return f"{article} {_predicate(event)}"


def _event_of(clip: Clip, index: int) -> Event | None:
    return next((event for event in clip.events if event.thing == index), None)


def ask_story(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """What happens?"""
    question = dice.pick(
        (
            "What happens{in}?",
            "What happens{in}?",
            "What happens{in}?",
            "What is happening{in}?",
            "What is going on{in}?",
            "Tell me what happens{in}.",
            "What changes{in}?",
            "Describe the clip.",
            "Describe what happens{in}.",
            "What happens in which order?",
        )
    ).replace("{in}", where)
    if not clip.events:
        return Turn("story", question, "Nothing happens.")
    clauses = [_clause(clip, event) for event in clip.events]
    return Turn("story", question, sentence(", then ".join(clauses)))


def ask_direction(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """Which way does the red star move?"""
    movers = [event for event in clip.events if event.kind == "move"]
    if movers and dice.chance(0.88):
        event, index = dice.pick([(event, event.thing) for event in movers])
    elif clip.events and not movers and dice.chance(0.6):
        return None
    else:
        index = dice.integer(0, len(clip.things) - 1)
        event = _event_of(clip, index)
        event = event if event is not None and event.kind == "move" else None
    noun = _noun(dice, clip, clip.things[index])
    question = dice.pick(
        (
            f"Which way does {noun} move{{in}}?",
            f"Which way does {noun} move{{in}}?",
            f"Which way does {noun} go{{in}}?",
            f"Where does {noun} move{{in}}?",
            f"Where does {noun} go{{in}}?",
            f"In which direction does {noun} move{{in}}?",
            f"In what direction does {noun} move{{in}}?",
            f"How does {noun} move{{in}}?",
            f"Does {noun} move left or right{{in}}?"
            if event is not None and event.direction in ("left", "right")
            else f"Which way does {noun} move{{in}}?",
            f"Does {noun} move up or down{{in}}?"
            if event is not None and event.direction in ("up", "down")
            else f"Which direction does {noun} move{{in}}?",
        )
    ).replace("{in}", where)
    predicate = _predicate(event) if event is not None else "does not move"
    return Turn("direction", question, sentence(f"{noun} {predicate}"))


def ask_actor(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """What moves? What appears?"""
    kinds = [event.kind for event in clip.events]
    kind = dice.pick(kinds) if kinds and dice.chance(0.8) else dice.pick(tuple(VERBS))
    verb = dice.pick(_ASKED[kind])
    one = {"go away": "goes away", "show up": "shows up", "vanish": "vanishes"}.get(
        verb, verb.replace("change", "changes") if kind == "turn" else verb + "s"
    )
    question = dice.pick(
        (
            f"What {one}{{in}}?",
            f"What {one}{{in}}?",
            f"Which object {one}{{in}}?",
            f"Which shape {one}{{in}}?",
            f"Which thing {one}{{in}}?",
            f"What is it that {one}{{in}}?",
        )
    ).replace("{in}", where)
    nouns = [name(clip.things[event.thing]) for event in clip.events if event.kind == kind]
    if not nouns:
        return Turn("actor", question, f"Nothing {VERBS[kind][0]}.")
    article = with_article if kind == "appear" else "the {}".format
    who = listing([article(noun) for noun in nouns])
    return Turn("actor", question, sentence(f"{who} {VERBS[kind][len(nouns) > 1]}"))


def ask_change(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """What colour does the star become?"""
    turns = [event for event in clip.events if event.kind == "turn"]
    if turns and dice.chance(0.85):
        event = dice.pick(turns)
        index = event.thing
    else:
        index = dice.integer(0, len(clip.things) - 1)
        event = next((event for event in turns if event.thing == index), None)
    noun = _noun(dice, clip, clip.things[index])
    if dice.chance(0.2):
        shape = clip.things[index].shape
        if sum(thing.shape == shape for thing in clip.things) > 1:
            return None
        question = dice.pick(
            (
                f"What colour was the {shape} at first{{in}}?",
                f"What colour was the {shape} before{{in}}?",
                f"Which colour did the {shape} have at first{{in}}?",
            )
        ).replace("{in}", where)
        return Turn("change", question, f"The {shape} was {clip.things[index].colour} at first.")
    question = dice.pick(
        (
            f"What colour does {noun} turn{{in}}?",
            f"What colour does {noun} become{{in}}?",
            f"Which colour does {noun} turn{{in}}?",
            f"Which colour does {noun} take on{{in}}?",
            f"How does the colour of {noun} change{{in}}?",
            f"To what colour does {noun} change{{in}}?",
        )
    ).replace("{in}", where)
    predicate = _predicate(event) if event is not None else f"stays {clip.things[index].colour}"
    return Turn("change", question, sentence(f"{noun} {predicate}"))


def ask_order(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """What happens first? What happens after the star moves? Does one happen before the other?"""
    events = clip.events
    if len(events) < 2:
        return None
    style = dice.unit()
    if style < 0.4:
        index, word = dice.pick(
            ((0, "first"), (0, "at first"), (1, "second"), (-1, "last"), (-1, "in the end"))
        )
        return Turn("order", f"What happens {word}{where}?", sentence(_clause(clip, events[index])))
    index = dice.integer(0, len(events) - 2)
    earlier, later = events[index], events[index + 1]
    if style < 0.55:
        asked = _clause(clip, earlier)
        question = dice.pick((f"What happens after {asked}?", f"After {asked}, what happens next?"))
        return Turn("order", question, sentence(_clause(clip, later)))
    if style < 0.7:
        question = f"What happens before {_clause(clip, later)}?"
        question = question if index == 0 else question.replace("happens", "happens right")
        return Turn("order", question, sentence(_clause(clip, earlier)))
    first, second = (earlier, later) if dice.chance(0.5) else (later, earlier)
    nouns = [f"the {name(clip.things[event.thing])}" for event in (first, second)]
    question = f"Does {nouns[0]} {_plain(first)} before {nouns[1]} {_predicate(second)}?"
    answer = "Yes" if first is earlier else "No"
    return Turn("order", question, f"{answer}, {_clause(clip, earlier)} first.")


def ask_event_count(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """How many things happen? How many objects move?"""
    if dice.chance(0.5):
        number = len(clip.events)
        question = dice.pick(
            (
                "How many things happen{in}?",
                "How many events are there{in}?",
                "How many changes are there{in}?",
                "How much happens{in}?",
                "Count the events{in}.",
            )
        ).replace("{in}", where)
        verb = "happens" if number == 1 else "happen"
        return Turn("events", question, sentence(f"{counted(number, 'thing')} {verb}"))
    kind = dice.pick([e.kind for e in clip.events] or list(VERBS))
    kind = kind if dice.chance(0.75) else dice.pick(tuple(VERBS))
    number = sum(event.kind == kind for event in clip.events)
    noun = dice.pick(("objects", "things", "shapes"))
    question = f"How many {noun} {dice.pick(_ASKED[kind]).replace('its', 'their')}{where}?"
    verb = VERBS[kind][number != 1]
    return Turn("events", question, sentence(f"{counted(number, 'object')} {verb}"))


def _wrong(dice: Dice, event: Event) -> Event:
    """The same event with another direction or colour."""
    if event.kind == "move":
        return replace(event, direction=dice.pick([d for d in DIRECTIONS if d != event.direction]))
    return replace(event, colour=dice.pick([c for c in COLOURS if c != event.colour]))


def ask_happens(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """Does the red star move? Does anything disappear?"""
    kinds = [event.kind for event in clip.events]
    kind = dice.pick(kinds) if kinds and dice.chance(0.5) else dice.pick(tuple(VERBS))
    style = dice.unit()
    if style < 0.3:
        found = [_clause(clip, event) for event in clip.events if event.kind == kind]
        what = dice.pick(("anything", "something", "any object"))
        question = f"Does {what} {dice.pick(_ASKED[kind])}{where}?"
        if not found:
            return Turn("happens", question, f"No, nothing {VERBS[kind][0]}.")
        return Turn("happens", question, f"Yes, {listing(found)}.")
    if style < 0.65 and clip.events:
        event = dice.pick(clip.events)
        noun = f"the {name(clip.things[event.thing])}"
        wrong = event.kind in ("move", "turn") and dice.chance(0.5)
        asked = _wrong(dice, event) if wrong else event
        question = f"Does {noun} {_plain(asked)}{where}?"
        return Turn("happens", question, f"{'No' if wrong else 'Yes'}, {noun} {_predicate(event)}.")
    index = dice.integer(0, len(clip.things) - 1)
    noun = _noun(dice, clip, clip.things[index])
    event = _event_of(clip, index)
    question = f"Does {noun} {dice.pick(_ASKED[kind])}{where}?"
    if event is not None and event.kind == kind:
        return Turn("happens", question, f"Yes, {noun} {_predicate(event)}.")
    return Turn("happens", question, f"No, {noun} does not {VERBS[kind][1]}.")


def ask_when(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """When does the ring appear? How long is the clip?"""
    if clip.seconds == int(clip.seconds) and dice.chance(0.25):
        question = dice.pick(
            (
                "How long is the clip?",
                "How long does it last?",
                "How many seconds is the clip long?",
            )
        )
        return Turn("when", question, f"About {counted(int(clip.seconds), 'second')}.")
    if not clip.events:
        return None
    event = dice.pick(clip.events)
    noun = _noun(dice, clip, clip.things[event.thing])
    question = dice.pick(
        (
            f"When does {noun} {_plain(event)}{{in}}?",
            f"When does {noun} {dice.pick(_ASKED[event.kind])}{{in}}?",
            f"At what time does {noun} {_plain(event)}{{in}}?",
            f"After how many seconds does {noun} {_plain(event)}{{in}}?",
        )
    ).replace("{in}", where)
    return Turn("when", question, f"After about {counted(event.second, 'second')}.")


_STATE = {
    ask_place: 1.5,
    ask_list: 1.0,
    ask_describe: 0.8,
    ask_cell: 0.8,
    ask_count: 0.6,
    ask_exists: 0.6,
    ask_colour: 0.7,
    ask_shape: 0.6,
}
_LASTING = {ask_colour: 1.0, ask_shape: 1.0, ask_count: 1.0, ask_exists: 1.0, ask_list: 1.0}


def ask_state(dice: Dice, clip: Clip, where: str) -> Turn | None:
    """Any question about an image, asked of the start or the end, or of what never changes."""
    if all(event.kind == "move" for event in clip.events) and dice.chance(0.4):
        ask = dice.weighted(list(_LASTING), list(_LASTING.values()))
        turn = ask(dice, scene_at(clip, 0.0), where)
    else:
        ask = dice.weighted(list(_STATE), list(_STATE.values()))
        time, where = dice.pick(((0.0, " at the start"), (clip.seconds, " at the end")))
        turn = ask(dice, scene_at(clip, time), where)
    if turn is None or "picture" in turn.question:
        return None
    return replace(turn, task="state")


ASKERS = {
    ask_story: 1.5,
    ask_direction: 1.3,
    ask_actor: 1.3,
    ask_change: 0.9,
    ask_order: 1.3,
    ask_event_count: 1.1,
    ask_happens: 1.2,
    ask_when: 1.0,
    ask_state: 2.6,
}
CLIP_TASKS = (
    "story",
    "direction",
    "actor",
    "change",
    "order",
    "events",
    "happens",
    "when",
    "state",
)


def clip_turn(dice: Dice, clip: Clip) -> Turn | None:
    """A question about the clip, or None if the draw did not fit."""
    ask = dice.weighted(list(ASKERS), list(ASKERS.values()))
    turn = ask(dice, clip, " in the clip" if dice.chance(0.2) else "")
    if turn is not None and dice.chance(0.4):
        turn = replace(turn, question=turn.question.replace("clip", "video"))
    return turn
