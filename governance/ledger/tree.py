"""The Merkle tree of RFC 6962 section 2 (unchanged in RFC 9162 section 2), over stored complete subtrees.

A node is named by its level and its position in that level: `NodeId(0, i)` is the hash of leaf `i`, and
`NodeId(l, i)` the root of the complete subtree over the leaves `[i * 2**l, (i + 1) * 2**l)`. A full subtree
never changes, so a store only ever appends; roots and proofs are folded from O(log n) of these nodes,
fetched in one read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()


class NodeId(NamedTuple):
    """The place of a complete subtree: level 0 holds the leaf hashes."""

    level: int
    position: int


class NodeReader(Protocol):
    """Fetches stored nodes; the returned mapping must hold every node asked for."""

    def __call__(self, wanted: Sequence[NodeId], /) -> Mapping[NodeId, bytes]: ...


class TreeRangeError(ValueError):
    """An index or a size lies outside the tree."""


class MissingNodeError(LookupError):
    """The store lacks a node that a tree of this size must have."""

    def __init__(self, node: NodeId) -> None:
        super().__init__(f"the store has no node at level {node.level}, position {node.position}")
        self.node = node


def leaf_hash(entry: bytes) -> bytes:
    """Hash of a leaf, 32 bytes: SHA-256(0x00 || entry) (RFC 9162, 2.1.1)."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node, 32 bytes: SHA-256(0x01 || left || right) (RFC 9162, 2.1.1)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def complete_subtrees(first: int, end: int) -> list[NodeId]:
    """The complete subtrees, left to right, that make up the leaves `[first, end)`.

    The range must be one that the tree itself splits into: `first` a multiple of the power of two that
    spans it.
    """
    nodes = []
    while first < end:
        level = (end - first).bit_length() - 1
        nodes.append(NodeId(level, first >> level))
        first += 1 << level
    return nodes


def root(size: int, read: NodeReader) -> bytes:
    """Root hash of the tree of the first `size` leaves; SHA-256 of nothing for the empty tree."""
    if size < 0:
        raise TreeRangeError(f"tree size {size} is negative")
    if size == 0:
        return EMPTY_ROOT
    return _range_hashes([(0, size)], read)[0]


def inclusion_proof(index: int, size: int, read: NodeReader) -> list[bytes]:
    """Audit path of leaf `index` in the tree of `size` leaves, from the leaf upwards (RFC 9162, 2.1.3.1)."""
    return inclusion_proofs([index], size, read)[0]


def inclusion_proofs(indexes: Sequence[int], size: int, read: NodeReader) -> list[list[bytes]]:
    """Audit paths of several leaves, in the order given, with a single read of the store."""
    paths = []
    for index in indexes:
        if not 0 <= index < size:
            raise TreeRangeError(f"leaf {index} is not in a tree of {size} leaves")
        paths.append(_inclusion_ranges(index, size))
    hashes = iter(_range_hashes([part for path in paths for part in path], read))
    return [[next(hashes) for _ in path] for path in paths]


def consistency_proof(old_size: int, new_size: int, read: NodeReader) -> list[bytes]:
    """Proof that the tree of `old_size` leaves is a prefix of that of `new_size` (RFC 9162, 2.1.4.1).

    Empty when the sizes are equal or the old tree is empty.
    """
    if not 0 <= old_size <= new_size:
        raise TreeRangeError(f"sizes {old_size} and {new_size} are not in order")
    if old_size == 0:
        return []
    return _range_hashes(_consistency_ranges(old_size, new_size), read)


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], expected_root: bytes) -> bool:
    """Whether `proof` leads from the leaf hash `leaf` at `index` to the root (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    fn, sn = index, size - 1
    computed = leaf
    for sibling in proof:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            computed = node_hash(sibling, computed)
            while not fn & 1 and fn != 0:
                fn >>= 1
                sn >>= 1
        else:
            computed = node_hash(computed, sibling)
        fn >>= 1
        sn >>= 1
    return sn == 0 and computed == expected_root


def verify_consistency(old_size: int, new_size: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """Whether `proof` shows that the old tree is a prefix of the new one (RFC 9162, 2.1.4.2)."""
    if not 0 <= old_size <= new_size:
        return False
    if old_size == new_size:
        return not proof and old_root == new_root
    if old_size == 0:
        return not proof and old_root == EMPTY_ROOT
    path = list(proof)
    if old_size & (old_size - 1) == 0:
        path.insert(0, old_root)
    if not path:
        return False
    fn, sn = old_size - 1, new_size - 1
    while fn & 1:
        fn >>= 1
        sn >>= 1
    old_computed = new_computed = path[0]
    for sibling in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            old_computed = node_hash(sibling, old_computed)
            new_computed = node_hash(sibling, new_computed)
            while not fn & 1 and fn != 0:
                fn >>= 1
                sn >>= 1
        else:
            new_computed = node_hash(new_computed, sibling)
        fn >>= 1
        sn >>= 1
    return sn == 0 and old_computed == old_root and new_computed == new_root


class Frontier:
    """The right edge of a growing tree: the complete subtrees that its size is made of.

    Appending a leaf yields the complete nodes that come into being (none or a few, of level 1 and up),
    which are all that a store needs to keep besides the leaf hash.
    """

    __slots__ = ("_edge", "size")

    def __init__(self, size: int = 0, edge: Iterable[bytes] = ()) -> None:
        self.size = size
        levels = [node.level for node in complete_subtrees(0, size)]
        self._edge = dict(zip(levels, edge, strict=True))

    @classmethod
    def load(cls, size: int, read: NodeReader) -> Frontier:
        """The edge of a stored tree. Raises `MissingNodeError` when the store is short of a node."""
        wanted = complete_subtrees(0, size)
        return cls(size, _fetch(wanted, read)) if wanted else cls()

    def append(self, leaf: bytes) -> list[tuple[NodeId, bytes]]:
        """Adds a leaf hash; returns the complete nodes of level >= 1 that it finishes, lowest first."""
        finished = []
        level, index, computed = 0, self.size, leaf
        while index & 1:
            computed = node_hash(self._edge.pop(level), computed)
            level += 1
            index >>= 1
            finished.append((NodeId(level, index), computed))
        self._edge[level] = computed
        self.size += 1
        return finished

    def root(self) -> bytes:
        """Root hash of the tree as it stands."""
        return _fold([self._edge[level] for level in sorted(self._edge, reverse=True)])


def _split(first: int, end: int) -> int:
    """Where RFC 9162 divides the leaves `[first, end)`: the largest power of two below their number."""
    return first + (1 << ((end - first - 1).bit_length() - 1))


def _inclusion_ranges(index: int, size: int) -> list[tuple[int, int]]:
    ranges = []
    first, end = 0, size
    while end - first > 1:
        split = _split(first, end)
        if index < split:
            ranges.append((split, end))
            end = split
        else:
            ranges.append((first, split))
            first = split
    return ranges[::-1]


def _consistency_ranges(old_size: int, new_size: int) -> list[tuple[int, int]]:
    ranges = []
    first, end = 0, new_size
    while end != old_size:
        split = _split(first, end)
        if old_size <= split:
            ranges.append((split, end))
            end = split
        else:
            ranges.append((first, split))
            first = split
    if first != 0:  # the old tree is not this subtree alone, so the verifier cannot know its hash
        ranges.append((first, end))
    return ranges[::-1]


def _range_hashes(ranges: Sequence[tuple[int, int]], read: NodeReader) -> list[bytes]:
    """Hash of each range of leaves, with one read for all."""
    parts = [complete_subtrees(first, end) for first, end in ranges]
    wanted = list(dict.fromkeys(node for part in parts for node in part))
    found = dict(zip(wanted, _fetch(wanted, read), strict=True)) if wanted else {}
    return [_fold([found[node] for node in part]) for part in parts]


def _fetch(wanted: Sequence[NodeId], read: NodeReader) -> list[bytes]:
    stored = read(wanted)
    for node in wanted:
        if node not in stored:
            raise MissingNodeError(node)
    return [stored[node] for node in wanted]


def _fold(hashes: Sequence[bytes]) -> bytes:
    """Joins complete subtrees, largest first, into the hash of the range they span."""
    if not hashes:
        return EMPTY_ROOT
    computed = hashes[-1]
    for left in hashes[-2::-1]:
        computed = node_hash(left, computed)
    return computed
