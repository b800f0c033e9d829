"""The paged key-value cache's blocks: who holds which, which contents can be found again, which are free."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NO_DIGEST = b""


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free."""


class IntegrityError(RuntimeError):
    """The bookkeeping contradicts itself: a defect of this program, never of a request."""


class BlockPool:
    """Counts references to `blocks` blocks of `block_size` token positions each, and remembers full blocks by their contents.

    A block is free when nobody references it. A free block whose contents are registered stays findable until it is
    handed out again; blocks without such contents are handed out first, then the one that has been free for longest.

    Contents are named by a chained digest: blake2b-256 of the parent block's digest and the block's token ids. A digest
    therefore stands for the whole prefix up to the block's end, and is trusted as if the tokens had been compared.

    Only full blocks below a sequence's `full` watermark become findable, so only those are ever shared, and a sequence
    writes at positions >= `full` alone: nobody ever writes into a block that somebody else reads.
    """

    def __init__(self, blocks: int, block_size: int, prefix_caching: bool) -> None:
        """Start with every block free and nothing findable; raise ValueError unless both numbers are at least 1."""
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {blocks} blocks of {block_size} tokens; both must be 1 or more")
        self.blocks = blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * blocks
        self._digests = [NO_DIGEST] * blocks
        """Of each block's contents where they are full and known, findable or a copy of what is findable."""
        self._found: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        """Free blocks, the next to be handed out first."""
        self._packer = struct.Struct(f"{block_size}q")

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can hand out now, the findable ones among them included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody references."""
        return self.blocks - len(self._free)

    @property
    def usage(self) -> float:
        """The part of the pool that is referenced, 0 to 1."""
        return self.used / self.blocks

    def blocks_for(self, rows: int) -> int:
        """Return how many blocks hold positions [0, rows)."""
        return -(-rows // self.block_size)

    def findable(self, block: int) -> bool:
        """Say whether `match` may hand this block to another sequence."""
        return self._found.get(self._digests[block]) == block

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest run of findable blocks that hold the first tokens, with a reference taken on each.

        At least one token is left over, since a token is chosen only after a row has been run: at most
        (len(tokens) - 1) // block_size blocks. The caller releases them like allocated ones.
        """
        hit: list[int] = []
        if not self._found:
            return hit
        digest = NO_DIGEST
        for index in range((len(tokens) - 1) // self.block_size):
            digest = self._digest(digest, tokens, index)
            block = self._found.get(digest)
            if block is None:
                break
            hit.append(block)
        for block in hit:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        return hit

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; what could be found in them is forgotten.

        All or nothing: raises OutOfBlocksError, and changes nothing, when fewer are free (see `free_count`).
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks were asked for; {len(self._free)} of {self.blocks} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            if self._digests[block]:
                del self._found[self._digests[block]]
                self._digests[block] = NO_DIGEST
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference on each block back. `blocks` are in the order of a sequence's table.

        The table's end becomes free first and so is reused first: a block is of no use to `match` without those before it.
        Raises ValueError for a block that nobody references.
        """
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but nobody references it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._free[block] = None
            digest = self._digests[block]
            if not digest or self._found.setdefault(digest, block) != block:  # blank, or a copy of a findable block
                self._digests[block] = NO_DIGEST
                self._free.move_to_end(block, last=False)

    def register(self, blocks: Sequence[int], tokens: Sequence[int], full: int) -> None:
        """Make findable the blocks of a sequence's table that lie wholly below its watermark `full`, in rows.

        tokens are the sequence's own, at least `full` of them; the caller holds the blocks. Blocks registered before cost
        nothing. Where equal contents are findable already, that block stays the one that is found.
        """
        if not self.prefix_caching:
            return
        end = full // self.block_size
        if full > len(tokens) or end > len(blocks):
            raise ValueError(f"a watermark of {full} rows with {len(tokens)} tokens and {len(blocks)} blocks of {self.block_size}")
        begin = end
        while begin and not self._digests[blocks[begin - 1]]:
            begin -= 1
        digest = self._digests[blocks[begin - 1]] if begin else NO_DIGEST
        for index in range(begin, end):
            digest = self._digest(digest, tokens, index)
            self._digests[blocks[index]] = digest
            self._found.setdefault(digest, blocks[index])

    def forget(self) -> None:
        """Let nothing be found any more: what the blocks held is lost. Only while nobody references one; raises ValueError else."""
        if self.used:
            raise ValueError(f"{self.used} blocks are referenced; what they hold cannot be forgotten")
        self._found.clear()
        self._digests = [NO_DIGEST] * self.blocks

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise IntegrityError when an invariant is broken; with `tables`, also when they are not exactly the references held."""
        for block, count in enumerate(self._references):
            if count < 0:
                raise IntegrityError(f"block {block} has {count} references")
            if (count == 0) != (block in self._free):
                raise IntegrityError(f"block {block} has {count} references and is {'' if block in self._free else 'not '}free")
            digest = self._digests[block]
            if count == 0 and digest and self._found.get(digest) != block:
                raise IntegrityError(f"free block {block} has a digest under which block {self._found.get(digest)} is found")
        if not self._free.keys() <= set(range(self.blocks)):
            raise IntegrityError(f"free blocks {sorted(self._free.keys() - set(range(self.blocks)))} are not of this pool")
        for digest, block in self._found.items():
            if self._digests[block] != digest:
                raise IntegrityError(f"block {block} is found under a digest that is not its own")
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            wrong = {block: (count, held[block]) for block, count in enumerate(self._references) if count != held[block]}
            if wrong:
                raise IntegrityError(f"references counted and held differ, {{block: (counted, held)}}: {wrong}")

    def _digest(self, parent: bytes, tokens: Sequence[int], index: int) -> bytes:
        """Name the contents of the block that holds tokens [index * block_size, (index + 1) * block_size)."""
        start = index * self.block_size
        return hashlib.blake2b(parent + self._packer.pack(*tokens[start : start + self.block_size]), digest_size=32).digest()
