"""What a compiled program moves between its devices: bytes of each collective, by mesh axis, times the trips of its loops.

Read from the text of the optimised program. Bytes are those that leave a device when n devices form a ring: an all-gather or
reduce-scatter of a whole of b bytes sends b (n - 1) / n, an all-reduce twice that, an all-to-all b (n - 1) / n, a permutation b. A
`ragged-all-to-all` counts its whole buffer, the most it can send.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1}
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^=]*)?.*\{\s*$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclass
class Collective:
    """One instruction; `shape` is that of its largest result."""

    kind: str
    sent: float  # bytes that leave a device
    shape: tuple[int, ...]
    axes: str  # mesh axes of its groups, "data+fsdp"
    name: str


@dataclass
class Loop:
    body: str
    trips: int | None  # None: known at run time only
    name: str  # of the operation in the source, e.g. jit(_sample)/decode/while


@dataclass
class Computation:
    collectives: list[Collective] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    limit: int | None = None  # of a loop's condition: counter < limit


class Program:
    """The computations of an optimised program and the mesh whose devices it runs on."""

    def __init__(self, text: str, mesh_shape: Mapping[str, int]):
        self.mesh_shape = dict(mesh_shape)
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self._read(text)

    def _read(self, text: str) -> None:
        current = None
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                match = _COMPUTATION.match(line)
                if match:
                    current = self.computations[match[2]] = Computation()
                    if match[1]:
                        self.entry = match[2]
            elif current is not None:
                match = _INSTRUCTION.match(line)
                if match:
                    self._instruction(current, *match.groups())

    def _instruction(self, current: Computation, name: str, result: str, opcode: str, rest: str) -> None:
        kind = opcode.removesuffix("-start")
        called = [part.strip(" %") for group in _CALLED.findall(rest) for part in group.strip("{}").split(",")]
        if opcode == "while":
            trips = re.search(r'known_trip_count"?:\s*\{"?n"?:"?(\d+)', rest)
            body = re.search(r"body=%?([\w.\-]+)", rest)
            condition = re.search(r"condition=%?([\w.\-]+)", rest)
            source = re.search(r'op_name="([^"]*)"', rest)
            assert body is not None and condition is not None, rest
            # The TPU compiler does not write the number down; our loops count from 0 in steps of 1.
            limit = int(trips[1]) if trips else self.computations[condition[1]].limit
            source_name = source[1] if source else name
            passes = re.search(
                r"\bpasses_(\d+)/while$", source_name
            )  # how many is known at run time, here the most there can be
            current.loops.append(Loop(body[1], int(passes[1]) if passes else limit, source_name))
        elif opcode == "constant" and re.match(r"\d+\)", rest):
            current.constants[name] = int(rest.split(")")[0])
        elif opcode == "compare" and "direction=LT" in rest:
            current.limit = current.constants.get(rest.split(")")[0].split("%")[-1])
        elif kind in COLLECTIVES:
            current.collectives.append(self._collective(kind, opcode, name, result, rest))
        elif opcode.startswith("fusion") and any("all-reduce-scatter" in part for part in called):
            # TPU: an all-reduce whose result is sliced at once, run as a reduce-scatter.
            inner = [c for part in called for c in self.computations[part].collectives]
            for one in inner:
                current.collectives.append(Collective("reduce-scatter", one.sent / 2, one.shape, one.axes, one.name))
        elif opcode not in ("reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"):
            current.calls += called

    def _collective(self, kind: str, opcode: str, name: str, result: str, rest: str) -> Collective:
        arrays = [
            (tuple(int(n) for n in dims.split(",") if n), BYTES.get(dtype, 4))
            for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", result)
        ]
        if opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
            # (operands, results, ...): of the counters at the end of a permutation nothing is sent.
            arrays = [a for a in arrays if a[0]]
            arrays = arrays[len(arrays) // 2 :]
        size = sum(math.prod(shape) * width for shape, width in arrays)
        groups = self._groups(rest)
        n = len(groups[0]) if groups else math.prod(self.mesh_shape.values())
        if kind == "collective-permute":
            n, axes = 2, self._axes(np.array(groups))
            sent = float(size)
        else:
            axes = self._axes(np.array(groups[:1] or [list(range(n))]))
            share = (n - 1) / n
            sent = size * {"all-reduce": 2 * share, "reduce-scatter": n - 1}.get(kind, share)
        shape = max((shape for shape, _ in arrays), key=math.prod, default=())
        return Collective(kind, sent, shape, axes, name)

    @staticmethod
    def _groups(rest: str) -> list[list[int]]:
        """Device numbers of each group; of a permutation, its pairs."""
        named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest)
        if named:
            of_axis = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
            names, sizes = list(of_axis), list(of_axis.values())
            places = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes))
            # Axes, or parts of one: 'a':(2)4 is the middle of an axis of 2 x 4 x what is left. Members differ in these alone.
            for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", named[2]):
                axis = names.index(name)
                length = int(part or sizes[axis])
                below = sizes[axis] // (int(before or 1) * length)
                places[axis] -= places[axis] // below % length * below
            group = np.ravel_multi_index(tuple(places), sizes)
            return np.argsort(group, kind="stable").reshape(len(np.unique(group)), -1).tolist()
        iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
        if iota:
            of = lambda text: [int(n) for n in text.split(",")]
            ids = np.arange(math.prod(of(iota[2]))).reshape(of(iota[2]))
            if iota[3]:
                ids = ids.transpose(of(iota[3]))
            return ids.reshape(of(iota[1])).tolist()
        written = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", rest)
        if not written:
            return []
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", written[1])]

    def _axes(self, groups: np.ndarray) -> str:
        """The mesh axes along which the devices of a group differ; numbers count the mesh's devices in order."""
        names, sizes = list(self.mesh_shape), list(self.mesh_shape.values())
        places = np.stack(np.unravel_index(groups, sizes))  # [axes, groups, members]
        differ = (places != places[:, :, :1]).any(axis=(1, 2))
        return "+".join(name for name, different in zip(names, differ, strict=True) if different) or "none"

    def walk(self, computation: str | None = None, times: float = 1) -> Iterator[tuple[Collective, float]]:
        """Every collective below a computation (all of them by default) and how often it runs; a loop of unknown length counts once."""
        here = self.computations[computation or self.entry]
        for collective in here.collectives:
            yield collective, times
        for loop in here.loops:
            yield from self.walk(loop.body, times * (1 if loop.trips is None else loop.trips))
        for name in here.calls:
            if name in self.computations:
                yield from self.walk(name, times)

    def bytes_by_axis(self, computation: str | None = None) -> dict[str, float]:
        """Bytes that leave a device, by mesh axis."""
        total: dict[str, float] = defaultdict(float)
        for collective, times in self.walk(computation):
            total[collective.axes] += collective.sent * times
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def bytes_by_kind(self, computation: str | None = None) -> dict[str, float]:
        """Bytes that leave a device, as "all-gather fsdp"."""
        total: dict[str, float] = defaultdict(float)
        for collective, times in self.walk(computation):
            total[f"{collective.kind} {collective.axes}"] += collective.sent * times
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @functools.cached_property
    def token_loop(self) -> str | None:
        """The body of the loop over tokens of the sampler."""
        named = [loop for c in self.computations.values() for loop in c.loops if re.search(r"decode/while$", loop.name)]
        return named[0].body if named else None

    def moved_weights(self, smallest: int, rows: int) -> list[Collective]:
        """Collectives of the token loop as large as a weight: at least `smallest` elements, and no activation of `rows` rows or a part.

        An activation's first dimension counts rows, all of them or those of a device; a `ragged-all-to-all` moves the rows of experts.
        """
        if self.token_loop is None:
            return []
        found = []
        for collective, _ in self.walk(self.token_loop):
            leading = next((n for n in collective.shape if n != 1), 1)
            activation = collective.kind == "ragged-all-to-all" or (leading > 1 and rows % leading == 0)
            if math.prod(collective.shape) >= smallest and not activation:
                found.append(collective)
        return found
