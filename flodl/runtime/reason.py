"""What an error of a connection says, as the operating system puts it."""

import os
import re
import socket
import ssl
from typing import Final

_NUMBERED: Final = re.compile(r"\[Errno (\d{1,9})\]")


def reason_of(error: BaseException) -> str:
    """Why, without the words of asyncio: ``Connection refused``, not ``Connect call failed ('10.0.0.5', 22)``. Of
    several addresses tried at once ("Multiple exceptions"), each reason once.
    """
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError):  # these number otherwise
        if error.errno:
            return os.strerror(error.errno)
        numbers = dict.fromkeys(map(int, _NUMBERED.findall(str(error))))
        if numbers:
            return ", ".join(map(os.strerror, numbers))
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
