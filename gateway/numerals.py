"""Whole numbers that clients write as text, in queries and forms."""


def whole_number(text: str, *, most: int) -> int | None:
    """Return the number that ASCII digits say, None when they say none from 0 to `most`.

    The length is looked at first: Python refuses to convert thousands of digits, and takes long for fewer.
    """
    digits = text.lstrip("0") or text[-1:]
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if number <= most else None
