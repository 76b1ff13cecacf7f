"""The KV cache of one engine, as numbers of blocks.

A block is *private* (not yet full) or *named* by the hash of all tokens up to its end. Named blocks
are shared by sequences with the same beginning and counted by users. One without users stays
cached until its room is needed, the least recently used first, as in vLLM's block pool.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockCache:
    """Counts blocks; it holds no data.

    Args:
        capacity: number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._private = 0
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Return the blocks that can be taken: free ones and cached ones without users."""
        return self.capacity - self._private - len(self._users) + len(self._idle)

    @property
    def usage(self) -> float:
        """Return the share of blocks in use by sequences, from 0 to 1."""
        return 1.0 - self.available / self.capacity

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """Return how many leading blocks of ``hashes``, at most ``limit``, are cached."""
        users = self._users
        for i in range(min(len(hashes), limit)):
            if hashes[i] not in users:
                return i
        return min(len(hashes), limit)

    def acquire(self, hashes: Sequence[int], private: int, spare: int = 0) -> bool:
        """Take the named blocks ``hashes`` and ``private`` more; return False if they do not fit.

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
        """Free the blocks of a sequence.

        Args:
            hashes: its named blocks.
            private: its private blocks.
            named: names of the private blocks that are full and stay cached.
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
        excess = self._private + len(self._users) - self.capacity
        for _ in range(excess):
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._users[oldest]
