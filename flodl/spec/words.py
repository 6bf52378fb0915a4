"""Words of others inside flodl's own lines."""


def printable(text: str) -> str:
    """``text`` with its control characters escaped, but for tabs and ends of lines: a terminal does not obey them."""
    return "".join(each if each.isprintable() or each in "\t\n" else repr(each)[1:-1] for each in text)
