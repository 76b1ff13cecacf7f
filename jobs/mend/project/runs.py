"""Run-length encoding."""


def encode(text: str) -> str:
    """Each run of equal letters as the letter and how often it comes: aab is a2b1."""
    found, count = "", 0
    for place, letter in enumerate(text):
        if place and letter != text[place - 1]:
            found += f"{text[place - 1]}{count}"
            count = 0
        count += 1
    return found
