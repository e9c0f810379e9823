"""The programs of a run, compiled for the devices of a topology, and what the compiler says of each."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cispo_jax import models, sharding
from cispo_jax.config import Config
from cispo_jax.models import cache as caches
from cispo_jax.programs import Programs, make_programs
from cispo_jax.sampling import decode, slots
from cispo_jax.sampling.draw import Choice, Rules
from cispo_jax.training import packing
from cispo_jax.types import Packed
from experiments.plan.hlo import Program

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Sizes:
    """Rows and columns of the programs."""

    rows: int  # of an update whose responses are all as long as they may be
    micro_rows: int  # of one forward and backward pass
    columns: int  # of tokens in such a row
    targets: int  # predicted tokens in it
    decode_rows: int  # responses decoded at a time
    prompts: int  # prefilled at a time
    prompt: int  # columns of a prompt
    response: int  # of a response

    @staticmethod
    def of(config: Config, programs: Programs) -> Sizes:
        G, P, layout = config.sampling.group_size, config.sampling.prompts_per_step, programs.layout
        prompts = P
        if programs.slots:
            devices = sharding.batch_devices(programs.sampling_mesh)
            prompts = slots.prompts_at_a_time(P, G, programs.slots, devices)
        return Sizes(
            rows=layout.passes * layout.rows,
            micro_rows=layout.rows,
            columns=layout.tokens,
            targets=layout.responses,
            decode_rows=programs.slots or P * G,
            prompts=prompts,
            prompt=config.data.max_prompt_tokens,
            response=config.sampling.max_new_tokens,
        )


@dataclass
class Compiled:
    """What is known of one program, per device; None where the compiler refused it."""

    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    needed_bytes: int | None = None  # on a refusal, of its message
    available_bytes: int | None = None
    refusal: str = ""
    compile_seconds: float = 0.0
    program: Program | None = None


class Lowered:
    """The programs of a run with the shapes and layouts of their arguments; each method lowers one of them."""

    def __init__(
        self,
        config: Config,
        architecture: models.TransformerConfig,
        mesh: jax.sharding.Mesh,
        memory: int | None = None,
    ):
        self.config = config
        width = config.data.max_prompt_tokens
        self.programs: Programs = make_programs(config, architecture, mesh, prompt_width=width, memory=memory)
        self.sizes = Sizes.of(config, self.programs)
        self.state = _placed(self.programs.abstract_state, self.programs.shardings)

    def train_step(self):
        return self.programs.train_step.lower(self.state, self.batch(), jax.ShapeDtypeStruct((), jnp.float32))

    def batch(self) -> Packed:
        """A mini-batch as the trainer hands it to the step."""
        architecture = self.state.model.config
        replayed = (architecture.num_layers, architecture.experts_per_token) * self.config.objective.routing_replay
        layout = sharding.passes_layout(self.programs.mesh)
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout(x))
        return jax.tree.map(place, packing.shapes(self.programs.layout, replayed, bool(self.config.objective.kl)))

    def reshard(self):
        if not hasattr(self.programs.to_sampling, "lower"):
            return None  # one float32 device samples from the model that it trains
        return self.programs.to_sampling.lower(self.state.model)

    def prefill(self):
        if not self.programs.slots:
            return self._sample(response=1)
        return self._on_mesh(slots._prefill).lower(self.sampler(), *self._prompts(), **self._options())

    def decode(self):
        if not self.programs.slots:
            return self._sample(response=self.sizes.response)
        columns, count = self.config.sampling.sync_tokens, jax.ShapeDtypeStruct((), jnp.int32)
        return self._on_mesh(slots._decode).lower(
            self.sampler(), self.slots(), count, count, count, self._rules(), columns=columns, choice=Choice(), **self._options()
        )  # fmt: skip

    def widen(self):
        """To the largest cache from the one before; None where there is only one."""
        widths = self.widths
        if len(widths) < 2:
            return None
        return self._on_mesh(slots._widen).lower(
            self.slots(widths[-2]), jax.ShapeDtypeStruct((), jnp.int32), width=widths[-1]
        )

    @property
    def widths(self) -> list[int]:
        return slots.widths(self.sizes.prompt, self.sizes.response) if self.programs.slots else []

    def prefilled(self) -> Any:
        """The caches of the prompts that are prefilled together."""
        prefill = functools.partial(slots._prefill, **self._options())
        with jax.set_mesh(self.programs.sampling_mesh):
            cache = jax.eval_shape(prefill, self.sampler(), *self._prompts())
        return self._placed_by_axes(cache, caches.layout(cache))

    def slots(self, width: int = 0) -> Any:
        """The rows that decode together, with caches of `width` columns; 0: the largest."""
        empty = functools.partial(slots._empty, rows=self.sizes.decode_rows, width=width or self.widths[-1])
        with jax.set_mesh(self.programs.sampling_mesh):
            shapes = jax.eval_shape(empty, self.prefilled())
        rows = jax.tree.map(lambda x: P(sharding.BATCH), shapes._replace(cache=None))
        return self._placed_by_axes(shapes, rows._replace(cache=caches.layout(shapes.cache)))

    def sampler(self) -> Any:
        """The model in its layout for sampling."""
        mesh = self.programs.sampling_mesh
        model = jax.eval_shape(self.programs.to_sampling, self.state.model)
        return _placed(model, sharding.state_shardings(model, mesh, sharding.SAMPLING_RULES))

    def _sample(self, *, response: int):
        tokens, mask = self._prompts()
        ids = jax.ShapeDtypeStruct(tokens.shape[:1], jnp.uint32, sharding=tokens.sharding)
        return self._on_mesh(decode._sample).lower(
            self.sampler(), tokens, mask, ids, self._rules(), group_size=self.sizes.decode_rows // self.sizes.prompts,
            max_new_tokens=response, choice=Choice(), **self._options(),
        )  # fmt: skip

    def _on_mesh(self, function) -> sharding.OnMesh:
        return sharding.OnMesh(self.programs.sampling_mesh, function)

    def _prompts(self) -> tuple[Any, Any]:
        mesh, shape = self.programs.sampling_mesh, (self.sizes.prompts, self.sizes.prompt)
        split = self.sizes.prompts % sharding.batch_devices(mesh) == 0
        rows = sharding.batch_sharding(mesh) if split else sharding.replicated(mesh)  # as `sharding.shard_rows`
        tokens, mask = (jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for dtype in (jnp.int32, jnp.bool))
        return tokens, mask

    def _rules(self) -> Rules:
        return Rules.of(eos_ids=(0,), max_new_tokens=self.sizes.response)

    def _options(self) -> dict[str, Any]:
        return {"dtype": self.config.model.dtype, "record": self.config.objective.routing_replay}

    def _placed_by_axes(self, tree: Any, axes: Any) -> Any:
        mesh = self.programs.sampling_mesh
        return _placed(tree, jax.tree.map(lambda x, axes: jax.sharding.NamedSharding(mesh, axes), tree, axes))


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def bytes_of_device(tree: Any) -> int:
    """Bytes of the first device's share of placed arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


def compile_programs(
    lower: dict[str, Callable[[], Any]], mesh_of: Callable[[str], jax.sharding.Mesh], say: Callable[[str], None]
) -> dict[str, Compiled | None]:
    """Two programs at a time: a TPU's compiler keeps a core busy with one."""
    lowered = {name: function() for name, function in lower.items()}
    with ThreadPoolExecutor(2) as pool:
        say(f"compiling {', '.join(lowered)} ...")
        pending = {name: pool.submit(compile_program, program, mesh_of(name)) for name, program in lowered.items()}
        return {name: future.result() for name, future in pending.items()}


def compile_program(lowered: Any, mesh: jax.sharding.Mesh) -> Compiled | None:
    """Compiles one program; a refusal for want of memory is an answer, other errors are raised."""
    started = time.monotonic()
    if lowered is None:
        return None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        sizes = refused(str(error))
        if sizes is None:
            raise
        return Compiled(None, None, None, None, *sizes, str(error), time.monotonic() - started)
    memory = compiled.memory_analysis()
    sizes_of = lambda name: int(getattr(memory, f"{name}_size_in_bytes"))
    argument, output, temp, alias = map(sizes_of, ("argument", "output", "temp", "alias"))
    # Outputs that take the place of donated arguments are not counted twice.
    peak = int(getattr(memory, "peak_memory_in_bytes", 0)) or argument + output - alias + temp
    program = Program(compiled.as_text(), mesh.shape)
    return Compiled(argument, output, temp, peak, compile_seconds=time.monotonic() - started, program=program)


def refused(message: str) -> tuple[int, int] | None:
    """Needed and available bytes of a RESOURCE_EXHAUSTED message of the TPU compiler; None where it is something else."""
    amount = r"([\d.]+)([KMGT]?)i?B?"
    found = re.search(rf"[Uu]sed {amount} of {amount} hbm", message)
    # libtpu 0.0.50 raises the same refusal in other words.
    found = found or re.search(rf"required for [\w ]+ \({amount}\) exceeds available HBM \({amount}\)", message)
    if found is None:
        return None
    return int(float(found[1]) * UNITS[found[2]]), int(float(found[3]) * UNITS[found[4]])
