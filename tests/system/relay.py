"""Somebody who sits between a host and the controller: ``python relay.py LISTEN PORT TARGET KIND RECORD``.

KIND ``tls`` has a certificate of its own and opens TLS to both sides; ``plain`` passes bytes on. What the connecting
sides send, as this one sees it, goes to RECORD.1, RECORD.2, … for each connection.
"""

import asyncio
import sys
from pathlib import Path

from flodl.runtime.certificate import make_certificate
from flodl.runtime.tls import client_context

LISTEN, PORT, TARGET, KIND, RECORD = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5])


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Path | None) -> None:
    try:
        while data := await reader.read(65536):
            if record is not None:
                with record.open("ab") as file:
                    file.write(data)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main() -> None:
    count = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        record = RECORD.with_suffix(f".{count}")
        try:
            there = await asyncio.open_connection(TARGET, PORT, ssl=client_context() if KIND == "tls" else None)
        except OSError:
            writer.close()  # there is no controller yet
            return
        await asyncio.gather(pass_on(reader, there[1], record), pass_on(there[0], writer, None))

    context = make_certificate().context if KIND == "tls" else None
    server = await asyncio.start_server(relay, LISTEN, PORT, ssl=context)
    async with server:
        await server.serve_forever()


asyncio.run(main())
