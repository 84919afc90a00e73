"""What ranks say they are about to do, side by side in shared memory: numbers that must agree, and a text for people.

Nobody waits for the others, unless it is far ahead of them: of ranks that differ the last one sees it before it starts,
and the others hear of it while they wait for that one.
"""

from __future__ import annotations

from .peers import LINE, Peers

_KEPT = 16  # of each rank's last notices
_NUMBERS = 4  # words of a notice, of which three are used
_TEXT_BYTES = 512
# Of one rank: how many it has posted, then the numbers of the last ones, then their texts.
NOTICE_WORDS = LINE + _KEPT * (_NUMBERS + _TEXT_BYTES // 8)


class Notices:
    """The notices of the ranks of a group, as one of them sees them.

    Attributes:
        count: how many this rank has posted.
    """

    def __init__(self, peers: Peers, first: int, memory: memoryview) -> None:
        self.count: int = 0
        self._peers, self._bytes = peers, memory
        self._starts = [first + NOTICE_WORDS * rank for rank in range(peers.size)]
        self._own = self._starts[peers.rank]

    def post(self, numbers: tuple[int, int, int], text: bytes) -> None:
        """Say what this rank does next."""
        words, index, own = self._peers.words, self.count + 1, self._own
        if index > _KEPT:
            least = index - _KEPT + 2  # a rank reads its last notice but one again
            for rank, start in enumerate(self._starts):
                if words[start] < least:
                    self._peers.wait(start, least, rank)
        at = own + LINE + index % _KEPT * _NUMBERS
        words[at], words[at + 1], words[at + 2] = numbers
        kept = text[: _TEXT_BYTES - 2]
        at = self._text_at(own, index)
        self._bytes[at : at + 2 + len(kept)] = len(kept).to_bytes(2, "little") + kept
        words[own] = self.count = index

    def same(self, index: int) -> bool | None:
        """Whether all have said the same at their n-th notice; None if only those that have come to it.

        A third number that is not 0 is never the same: see `numbers`.
        """
        words, offset = self._peers.words, LINE + index % _KEPT * _NUMBERS
        own, all_came = self._own + offset, True
        first, second = words[own], words[own + 1]
        if words[own + 2]:
            return False
        for start in self._starts:
            if words[start] < index:
                all_came = False
            elif words[start + offset] != first or words[start + offset + 1] != second:
                return False
        return True if all_came else None

    def numbers(self, index: int) -> list[tuple[int, int, int] | None]:
        """What the ranks of the group have said at their n-th notice; None for those that have not come to it."""
        words, offset = self._peers.words, LINE + index % _KEPT * _NUMBERS
        return [
            (words[start + offset], words[start + offset + 1], words[start + offset + 2])
            if words[start] >= index
            else None
            for start in self._starts
        ]

    def text(self, rank: int, index: int = 0) -> str:
        """The n-th notice of a rank of the group, or its last one; '' if there is none."""
        start = self._starts[rank]
        index = index or self._peers.words[start]
        if not index:
            return ""
        at = self._text_at(start, index)
        length = int.from_bytes(self._bytes[at : at + 2], "little")
        return bytes(self._bytes[at + 2 : at + 2 + length]).decode(errors="replace")

    @staticmethod
    def _text_at(start: int, index: int) -> int:
        return (start + LINE + _KEPT * _NUMBERS) * 8 + index % _KEPT * _TEXT_BYTES
