"""The KV cache of one engine: blocks in use, blocks kept for their prefix, blocks free.

A block is *private* (its content is not yet a full, named block) or *named* by the hash of all
tokens up to its end. Named blocks are shared by sequences with the same beginning and counted by
users; one without users stays as cache until its room is needed, the longest unused first, as in
vLLM's block pool.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockCache:
    """Counts blocks; it holds no data.

    Args:
        capacity: number of blocks in all.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._private = 0
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Blocks that can be had now: free ones and cached ones without users."""
        return self.capacity - self._private - len(self._users) + len(self._idle)

    @property
    def usage(self) -> float:
        """Blocks in use by sequences, from 0 to 1 of the capacity."""
        return 1.0 - self.available / self.capacity

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """How many blocks at the start of ``hashes``, at most ``limit``, are in the cache."""
        users = self._users
        for i in range(min(len(hashes), limit)):
            if hashes[i] not in users:
                return i
        return min(len(hashes), limit)

    def acquire(self, hashes: Sequence[int], private: int, spare: int = 0) -> bool:
        """Take the named blocks ``hashes`` and ``private`` more, or nothing if they do not fit.

        ``spare`` blocks stay available for others.
        """
        users, idle = self._users, self._idle
        needed = private + spare
        for name in hashes:
            if users.get(name, 0) == 0:
                needed += 1
        if needed > self.available:
            return False
        for name in hashes:
            used = users.get(name)
            if used == 0:
                del idle[name]
            users[name] = (used or 0) + 1
        self._private += private
        self._evict()
        return True

    def grow(self, blocks: int) -> None:
        """Take ``blocks`` more private blocks; the caller has checked :attr:`available`."""
        self._private += blocks
        self._evict()

    def release(self, hashes: Sequence[int], private: int, named: Sequence[int] = ()) -> None:
        """Give back what a sequence held.

        Args:
            hashes: its named blocks.
            private: its private blocks.
            named: names of those private blocks that are full by now and worth keeping.
        """
        users, idle = self._users, self._idle
        self._private -= private
        for name in reversed(named):
            if name not in users:
                users[name] = 0
                idle[name] = None
        for name in reversed(hashes):
            users[name] -= 1
            if not users[name]:
                idle[name] = None

    def _evict(self) -> None:
        over = self._private + len(self._users) - self.capacity
        for _ in range(over):
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._users[oldest]
