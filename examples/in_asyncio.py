"""Pools in asyncio: `async with`, `await`, `async for`, deadlines that reach the drone.

python examples/in_asyncio.py
"""

import asyncio
import hashlib

import polycephaly as poly


def digest(text: str) -> str:
    """Stands for anything that would hold up the event loop."""
    return hashlib.pbkdf2_hmac("sha256", text.encode(), b"salt", 50_000).hex()


async def main() -> None:
    async with poly.Pool(2) as pool:
        ibm, hp = await asyncio.gather(pool.promise(digest, "IBM"), pool.promise(digest, "HP"))
        print(ibm[:8], hp[:8])

        promises = [pool.promise(pow, 2, n) for n in (3, 1, 2)]
        print(sorted([p.result() async for p in poly.as_completed(promises)]))

        print([d[:4] async for d in pool.map(digest, ("IBM", "HP", "GE"))])

        try:
            async with asyncio.timeout(0.2):
                await pool.promise("import time; time.sleep(60)")
        except TimeoutError:
            print("the deadline interrupted the drone, too")
        print(await pool.promise("'and it is free again'"))


if __name__ == "__main__":
    asyncio.run(main())
