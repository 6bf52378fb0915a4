"""How deep and how large a MessagePack value says it is, read from the raw bytes without building anything.

msgpack's own limits are per container: nested ones multiply, and 64 KiB of headers made it reserve 40 MB here.
"""

from typing import Final

_SCALAR = 0
_SKIP = 1
_ARRAY = 2
_MAP = 3
_REFUSED = 4


def bounds_fault(data: bytes, max_depth: int, max_elements: int) -> str | None:
    """Say what is wrong, or None when ``data`` nests at most ``max_depth`` containers and announces at most
    ``max_elements`` values, keys and containers altogether.

    It looks no further than it must: bytes that are cut short or left over are for the unpacker to refuse.
    """
    position, end = 0, len(data)
    pending, elements = 1, 1
    outer: list[int] = []
    while position < end:
        while not pending:
            if not outer:
                return None
            pending = outer.pop()
        pending -= 1
        kind, size, count = _FIRST_BYTE[data[position]]
        position += 1
        if kind == _SCALAR:
            position += size
            continue
        if kind == _REFUSED:
            return "a type that no message has"
        if size:
            count = int.from_bytes(data[position : position + size], "big")
            position += size
        if kind == _SKIP:
            position += count
            continue
        if kind == _MAP:
            count *= 2
        elements += count
        if elements > max_elements:
            return f"more than {max_elements} elements"
        if len(outer) == max_depth:
            return f"nested deeper than {max_depth}"
        outer.append(pending)
        pending = count
    return None


# Per first byte: kind of the value, size of what follows (a scalar, a count), count where the byte holds it.
_FIRST_BYTE: Final = (
    *((_SCALAR, 0, 0),) * 128,  # 00–7F small integers
    *((_MAP, 0, count) for count in range(16)),  # 80–8F
    *((_ARRAY, 0, count) for count in range(16)),  # 90–9F
    *((_SKIP, 0, count) for count in range(32)),  # A0–BF short strings
    (_SCALAR, 0, 0),  # C0 nil
    (_REFUSED, 0, 0),  # C1 never used
    *((_SCALAR, 0, 0),) * 2,  # C2, C3 false, true
    *((_SKIP, size, 0) for size in (1, 2, 4)),  # C4–C6 bytes
    *((_REFUSED, 0, 0),) * 3,  # C7–C9 extensions
    *((_SCALAR, size, 0) for size in (4, 8)),  # CA, CB floats
    *((_SCALAR, size, 0) for size in (1, 2, 4, 8)),  # CC–CF unsigned integers
    *((_SCALAR, size, 0) for size in (1, 2, 4, 8)),  # D0–D3 signed integers
    *((_REFUSED, 0, 0),) * 5,  # D4–D8 extensions
    *((_SKIP, size, 0) for size in (1, 2, 4)),  # D9–DB strings
    *((_ARRAY, size, 0) for size in (2, 4)),  # DC, DD
    *((_MAP, size, 0) for size in (2, 4)),  # DE, DF
    *((_SCALAR, 0, 0),) * 32,  # E0–FF small negative integers
)
