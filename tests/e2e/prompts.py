"""Twenty prompts, written for these tests: ordinary questions, code, edits and extractions."""

from __future__ import annotations

__all__ = ["EDITS", "ORDINARY", "PROMPTS"]

_FUNCTION = """def load_table(path, separator=",", header=True):
    rows = []
    with open(path) as stream:
        for number, line in enumerate(stream):
            if number == 0 and header:
                names = line.strip().split(separator)
                continue
            values = line.strip().split(separator)
            rows.append(dict(zip(names, values)))
    return rows
"""
_MINUTES = """Minutes of the harbour committee, 14 March.
Present: Ada Lindqvist (chair), Bo Ferrer, Chidi Okafor, Dana Weiss.
1. The crane at pier 3 is to be inspected on 2 April by Ferrer and Sons.
2. Mooring fees rise from 40 to 44 crowns a night from 1 May.
3. Chidi Okafor reports that the dredging of the north basin is finished.
4. The next meeting is on 18 April in the customs house.
"""
_LETTER = """Dear Ms Alvarez,

thank you for your order of 12 oak shelves. The shelves will be sent from our workshop in Ghent on
Monday and should reach you by Thursday. Please check the parcels for damage before you sign.

Kind regards,
the workshop
"""

EDITS = [
    f"Repeat this function exactly, but rename rows to records.\n\n{_FUNCTION}",
    f"Add a docstring to this function and change nothing else.\n\n{_FUNCTION}",
    f"Copy this function word for word.\n\n{_FUNCTION}",
    f"Repeat these minutes exactly, but change 18 April to 25 April.\n\n{_MINUTES}",
    f"Copy the four numbered items from these minutes, word for word.\n\n{_MINUTES}",
    f"Repeat this letter exactly, but for Mr Brandt instead of Ms Alvarez.\n\n{_LETTER}",
    f"Copy this letter, and correct nothing.\n\n{_LETTER}",
    "Repeat this JSON with the field city removed from each entry.\n\n"
    '[{"name": "Mina", "age": 31, "city": "Oslo"}, {"name": "Jan", "age": 27, "city": "Riga"}, '
    '{"name": "Lea", "age": 45, "city": "Bern"}]',
]

ORDINARY = [
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three ideas for a rainy afternoon.",
    "Explain photosynthesis to a child.",
    "Write a Python function that checks whether a number is prime.",
    "Who wrote Don Quixote, and what is it about?",
    "How do I boil an egg?",
    "Translate into French: the train leaves at seven in the morning.",
    "What are the planets of the solar system, in order?",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost?",
    "Tell me a story that begins with a locked door.",
]

PROMPTS = [*EDITS, *ORDINARY]
