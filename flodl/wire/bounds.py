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


def _first_byte(code: int) -> tuple[int, int, int]:
    """Kind of the value that starts with ``code``, size of what follows (a scalar, a count), count if in the byte."""
    if code <= 0x7F or code >= 0xE0:
        return _SCALAR, 0, 0
    if code <= 0x8F:
        return _MAP, 0, code & 0x0F
    if code <= 0x9F:
        return _ARRAY, 0, code & 0x0F
    if code <= 0xBF:
        return _SKIP, 0, code & 0x1F
    return _NAMED.get(code, (_REFUSED, 0, 0))


_NAMED: Final = {
    0xC0: (_SCALAR, 0, 0),  # nil
    0xC2: (_SCALAR, 0, 0),  # false
    0xC3: (_SCALAR, 0, 0),  # true
    0xC4: (_SKIP, 1, 0),  # bin 8
    0xC5: (_SKIP, 2, 0),
    0xC6: (_SKIP, 4, 0),
    0xCA: (_SCALAR, 4, 0),  # float 32
    0xCB: (_SCALAR, 8, 0),
    0xCC: (_SCALAR, 1, 0),  # uint 8
    0xCD: (_SCALAR, 2, 0),
    0xCE: (_SCALAR, 4, 0),
    0xCF: (_SCALAR, 8, 0),
    0xD0: (_SCALAR, 1, 0),  # int 8
    0xD1: (_SCALAR, 2, 0),
    0xD2: (_SCALAR, 4, 0),
    0xD3: (_SCALAR, 8, 0),
    0xD9: (_SKIP, 1, 0),  # str 8
    0xDA: (_SKIP, 2, 0),
    0xDB: (_SKIP, 4, 0),
    0xDC: (_ARRAY, 2, 0),  # array 16
    0xDD: (_ARRAY, 4, 0),
    0xDE: (_MAP, 2, 0),  # map 16
    0xDF: (_MAP, 4, 0),
}
_FIRST_BYTE: Final = tuple(_first_byte(code) for code in range(256))
