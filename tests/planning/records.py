"""Synthetic tape records: no model, no tensor. Costs and bytes are in the proportions of the real thing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from recals_exp.recals.record import SOURCE, BackwardEvent, ForwardEvent, OpRecord, TapeRecord, ValueRecord


@dataclass
class RecordBuilder:
    """Writes a record op by op; backward is what autograd does: nodes in reverse, fetch what was saved, free it."""

    values: list[list] = field(default_factory=list)  # [nbytes, producer, saved, pinned, external]
    ops: list[OpRecord] = field(default_factory=list)
    forward: list[ForwardEvent] = field(default_factory=list)
    nodes: list[tuple[int, ...]] = field(default_factory=list)  # what each backward node fetches
    handles: dict[int, int] = field(default_factory=dict)

    def source(self, nbytes: int = 1) -> int:
        self.values.append([nbytes, SOURCE, False, False, False])
        return len(self.values) - 1

    def op(
        self,
        name: str,
        inputs: tuple[int, ...],
        nbytes: int | tuple[int, ...],
        cost: float,
        *,
        saves_inputs: tuple[int, ...] = (),
        saves_outputs: tuple[int, ...] = (),
        pinned: bool = False,
    ) -> tuple[int, ...]:
        """One op with one output per entry of ``nbytes``; ``saves_outputs`` are positions in it."""
        sizes = (nbytes,) if isinstance(nbytes, int) else nbytes
        index = len(self.ops)
        for value in saves_inputs:
            self._save(value)
        outputs = tuple(range(len(self.values), len(self.values) + len(sizes)))
        self.values.extend([size, index, False, pinned, False] for size in sizes)
        read = tuple(dict.fromkeys(v for v in inputs if self.values[v][1] != SOURCE))
        self.ops.append(OpRecord(name, f"layer{index}", cost, 0, read, outputs))
        self.forward.append(("op", index))
        for position in saves_outputs:
            self._save(outputs[position])
        fetched = (*saves_inputs, *(outputs[p] for p in saves_outputs))
        if fetched:
            self.nodes.append(fetched)
        return outputs

    def _save(self, value: int) -> None:
        if self.values[value][1] != SOURCE:
            self.values[value][2] = True
            self.forward.append(("save", value))
            self.handles[value] = self.handles.get(value, 0) + 1

    def build(self, output: int | None, signature: str = "synthetic") -> TapeRecord:
        if output is not None:
            self.values[output][4] = True
        backward: list[BackwardEvent] = []
        for fetched in reversed(self.nodes):
            fetched = tuple(v for v in fetched if self.values[v][1] != SOURCE)
            backward += [("fetch", v) for v in fetched]
            for v in fetched:
                self.handles[v] -= 1
                if self.handles[v] == 0:
                    backward.append(("free", v))
        cost = sum(op.cost for op in self.ops)
        return TapeRecord(
            signature=signature,
            torch_version="none",
            device="none",
            cost_unit="model",
            values=tuple(ValueRecord(*v) for v in self.values),
            ops=tuple(self.ops),
            forward_events=tuple(self.forward),
            backward_events=tuple(backward),
            forward_cost=cost,
            backward_cost=2 * cost,
        )


def uniform_chain(layers: int, nbytes: int = 100) -> TapeRecord:
    """(Linear, Tanh) x layers: each layer costs 1 and saves one value, its output, fetched as result and as next input."""
    b = RecordBuilder()
    x = b.source()
    for _ in range(layers):
        (z,) = b.op("linear", (x,), nbytes, 0.9, saves_inputs=(x,))
        (x,) = b.op("tanh", (z,), nbytes, 0.1, saves_outputs=(0,))
    return b.build(x, f"chain{layers}")


def gpt_like(blocks: int, *, unit: int = 1000, dropout: bool = True) -> TapeRecord:
    """Pre-norm transformer blocks: cheap wide values (gelu, masks, softmax), big attention values, unsaved residual adds."""
    b = RecordBuilder()
    x = b.source()
    (x,) = b.op("embedding", (x,), 2 * unit, 1.0)

    def norm(x: int) -> int:
        return b.op("layer_norm", (x,), (2 * unit, 4, 4), 1.0, saves_inputs=(x,), saves_outputs=(1, 2))[0]

    def drop(x: int, size: int) -> int:
        if not dropout:
            return x
        (noise,) = b.op("bernoulli", (), size, 0.8)
        return b.op("mul", (x, noise), size, 0.5, saves_inputs=(noise,))[0]

    for _ in range(blocks):
        h = norm(x)
        q, k, v = (b.op("linear", (h,), 2 * unit, 5.0, saves_inputs=(h,))[0] for _ in range(3))
        (scores,) = b.op("bmm", (q, k), 8 * unit, 2.0, saves_inputs=(q, k))
        (p,) = b.op("softmax", (scores,), 8 * unit, 2.0, saves_outputs=(0,))
        p = drop(p, 8 * unit)
        (a,) = b.op("bmm", (p, v), 2 * unit, 2.0, saves_inputs=(p, v))
        (a,) = b.op("linear", (a,), 2 * unit, 5.0, saves_inputs=(a,))
        (x,) = b.op("add", (x, drop(a, 2 * unit)), 2 * unit, 0.5)
        h = norm(x)
        (h,) = b.op("linear", (h,), 8 * unit, 20.0, saves_inputs=(h,))
        (g,) = b.op("gelu", (h,), 8 * unit, 2.0, saves_inputs=(h,))
        (h,) = b.op("linear", (g,), 2 * unit, 20.0, saves_inputs=(g,))
        (x,) = b.op("add", (x, drop(h, 2 * unit)), 2 * unit, 0.5)
    h = norm(x)
    (y,) = b.op("linear", (h,), 4 * unit, 8.0, saves_inputs=(h,))
    return b.build(y, f"gpt{blocks}")


def resnet_like(blocks_per_stage: tuple[int, ...] = (3, 4, 6, 3), *, unit: int = 64) -> TapeRecord:
    """Bottleneck blocks: conv -> batch norm -> in-place relu; early stages hold much and cost little."""
    b = RecordBuilder()
    x = b.source()

    def conv(x: int, size: int, cost: float) -> int:
        return b.op("conv", (x,), size, cost, saves_inputs=(x,))[0]

    def norm(x: int, size: int) -> int:
        return b.op("batch_norm", (x,), (size, 2, 2), size / (40 * unit), saves_inputs=(x,), saves_outputs=(1, 2))[0]

    def relu(x: int, size: int) -> int:
        return b.op("relu_", (x,), size, size / (80 * unit), saves_outputs=(0,))[0]

    size = 64 * unit
    x = relu(norm(conv(x, size, 3.0), size), size)
    for stage, blocks in enumerate(blocks_per_stage):
        wide, narrow = 64 * unit >> stage, 16 * unit >> stage
        for block in range(blocks):
            h = relu(norm(conv(x, narrow, 1.0), narrow), narrow)
            h = relu(norm(conv(h, narrow, 1.5), narrow), narrow)
            h = norm(conv(h, wide, 1.0), wide)
            skip = norm(conv(x, wide, 1.5), wide) if block == 0 else x
            (h,) = b.op("add_", (h, skip), wide, wide / (80 * unit))
            x = relu(h, wide)
    (x,) = b.op("mean", (x,), 8, 0.1)
    (y,) = b.op("linear", (x,), 8, 0.1, saves_inputs=(x,))
    return b.build(y, "resnet" + "-".join(map(str, blocks_per_stage)))


def unet_like(depth: int, *, unit: int = 64) -> TapeRecord:
    """Encoder, decoder and a long skip per level, concatenated (a copy)."""
    b = RecordBuilder()
    x = b.source()

    def block(x: int, size: int) -> int:
        for _ in range(2):
            (h,) = b.op("conv", (x,), size, 4.0, saves_inputs=(x,))
            (x,) = b.op("relu", (h,), size, 0.3, saves_outputs=(0,))
        return x

    skips = []
    for level in range(depth):
        size = 32 * unit >> level
        x = block(x, size)
        skips.append((x, size))
        x = b.op("max_pool", (x,), (size // 4, size // 4), 0.2, saves_inputs=(x,), saves_outputs=(1,))[0]
    x = block(x, 32 * unit >> depth)
    for skip, size in reversed(skips):
        (up,) = b.op("conv_transpose", (x,), size, 2.0, saves_inputs=(x,))
        (x,) = b.op("cat", (skip, up), 2 * size, 0.3)
        x = block(x, size)
    (y,) = b.op("conv", (x,), unit, 0.5, saves_inputs=(x,))
    return b.build(y, f"unet{depth}")


def lstm_like(steps: int, *, unit: int = 16) -> TapeRecord:
    """A long chain of tiny ops: gates from input and state, two states carried."""
    b = RecordBuilder()
    x = b.source()
    (h,) = b.op("zeros", (), unit, 0.01)
    (c,) = b.op("zeros", (), unit, 0.01)
    for _ in range(steps):
        (a,) = b.op("addmm", (x,), 4 * unit, 1.0)
        (r,) = b.op("addmm", (h,), 4 * unit, 1.0, saves_inputs=(h,))
        (gates,) = b.op("add", (a, r), 4 * unit, 0.2)
        i, f, g, o = (b.op("sigmoid", (gates,), unit, 0.1, saves_outputs=(0,))[0] for _ in range(4))
        (fc,) = b.op("mul", (f, c), unit, 0.1, saves_inputs=(f, c))
        (ig,) = b.op("mul", (i, g), unit, 0.1, saves_inputs=(i, g))
        (c,) = b.op("add", (fc, ig), unit, 0.1)
        (tanh,) = b.op("tanh", (c,), unit, 0.1, saves_outputs=(0,))
        (h,) = b.op("mul", (o, tanh), unit, 0.1, saves_inputs=(o, tanh))
    (y,) = b.op("addmm", (h,), unit, 1.0, saves_inputs=(h,))
    return b.build(y, f"lstm{steps}")


def random_dag(seed: int, n_ops: int = 30, pinned_share: float = 0.05) -> TapeRecord:
    """Any shape autograd could make: several outputs, saves of inputs and outputs, values read far away, pinned ones."""
    rng = random.Random(seed)
    b = RecordBuilder()
    made = [b.source(), b.source()]
    for _ in range(n_ops):
        inputs = tuple({rng.choice(made[-6:] if rng.random() < 0.8 else made) for _ in range(rng.randint(1, 3))})
        sizes = tuple(rng.choice((1, 10, 40, 100)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        saves_inputs = tuple(v for v in inputs if rng.random() < 0.6)
        saves_outputs = tuple(p for p in range(len(sizes)) if rng.random() < 0.3)
        made += b.op(
            f"op{len(b.ops)}",
            inputs,
            sizes,
            rng.choice((0.0, 0.1, 1.0, 3.0)),
            saves_inputs=saves_inputs,
            saves_outputs=saves_outputs,
            pinned=rng.random() < pinned_share,
        )
    return b.build(made[-1] if rng.random() < 0.5 else None, f"random{seed}")
