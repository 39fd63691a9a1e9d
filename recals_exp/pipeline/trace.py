"""Cutting a model that is not a chain: its forward is traced, and the graph is cut between the model's blocks.

Why not `torch.distributed.pipelining.pipeline`: it traces in the same way, but fixes the mode (a pipeline traced in training
keeps training after ``eval()``), copies the buffers' place into each stage, and connects neighbours only.

Rules:

1. The graph is `torch.export`'s, traced in training and in eval mode; the mode of the modules at a call chooses. Modes
   that are mixed otherwise are refused.
2. A unit is a block: the outermost module that is not a mere container. Containers are the model itself, lists, plain
   sequentials, and modules that hold a list of equal blocks. Ops between blocks belong to the unit before.
3. A stage is the graph's nodes of its units, with the values from before as inputs, and the values needed later as results.
   Parameters and buffers are looked up in the model's modules at each call, so that loading, casting and moving them works.
4. Side effects (running statistics) are nodes like any other and stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from recals_exp.pipeline.budget import undone
from recals_exp.pipeline.placed import PlacedModule
from recals_exp.pipeline.stage import Take
from recals_exp.pipeline.units import CutStage, Units


@dataclass(frozen=True, slots=True)
class _State:
    """A parameter, buffer or constant: looked up when it is needed (rule 3)."""

    owner: Any  # the module it belongs to
    attribute: str

    def get(self) -> Any:
        return getattr(self.owner, self.attribute)


@dataclass(frozen=True, slots=True)
class _Graph:
    """One traced mode of the model."""

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]  # what computes, in order
    unit: dict[fx.Node, int]  # which unit a node belongs to; -1 for the model's inputs
    result: Any  # the model's result, with nodes for values
    rows: int | None  # the rows it is fixed to; None = any


@dataclass(frozen=True, slots=True)
class _Piece:
    """One stage in one mode."""

    graph: fx.GraphModule
    states: tuple[_State, ...]  # passed behind the inputs
    modes: tuple[tuple[nn.Module, bool], ...]  # the modules whose mode was traced in
    rows: int | None
    root_inputs: tuple[int, ...]  # which inputs are the model's own
    n_results: int  # for later stages; 0 for the last stage, which gives the model's result


class TracedUnits(Units):
    """A model cut by tracing."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...], dynamic: bool = True) -> None:
        graphs = {mode: _trace(model, example, mode, dynamic) for mode in (True, False)}
        names, assigned = _name_units(model, graphs[True])
        super().__init__(model, names)
        self._graphs: dict[bool, _Graph] = {}
        for mode, traced in graphs.items():
            units = assigned if mode else _assign(model, traced, names)
            self._graphs[mode] = _graph(traced, units)

    def stages(self, bounds: Sequence[int], relay: bool = False) -> list[CutStage]:
        self.check_bounds(bounds)
        cuts = {mode: _cut(self.model, graph, bounds, relay, mode) for mode, graph in self._graphs.items()}
        if relay and [piece.n_results for piece, _ in cuts[True]] != [piece.n_results for piece, _ in cuts[False]]:
            del cuts[False]  # neighbours agree on what they exchange once, for training
        stages = []
        for k in range(len(bounds) - 1):
            # the modes may want different values: a stage takes those of both, and each mode picks its own
            union = list(dict.fromkeys(take for cut in cuts.values() for take in cut[k][1]))
            picks = {mode: tuple(map(union.index, cut[k][1])) for mode, cut in cuts.items()}
            if relay:
                picks = {mode: tuple(range(len(cut[k][1]))) for mode, cut in cuts.items()}
            name = self.stage_name(bounds[k], bounds[k + 1])
            pieces = {mode: cut[k][0] for mode, cut in cuts.items()}
            stages.append(CutStage(name, TracedStage(name, pieces, picks), None if relay else union))
        return stages


class TracedStage(PlacedModule):
    """The part of a traced model between two cuts."""

    def __init__(self, name: str, pieces: dict[bool, _Piece], picks: dict[bool, tuple[int, ...]]) -> None:
        super().__init__()
        self._name = name
        self._pieces = pieces
        self._picks = picks
        self._width = max(piece.n_results for piece in pieces.values())
        for number, state in enumerate(self._states()):
            value = state.get()
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"{number}", value)

    def forward(self, *inputs: Any) -> Any:
        mode = self._mode()
        piece = self._pieces[mode]
        inputs = tuple(inputs[index] for index in self._picks[mode])
        if piece.rows is not None:
            for index in piece.root_inputs:
                if isinstance(inputs[index], Tensor) and inputs[index].shape[0] != piece.rows:
                    raise ValueError(
                        f"stage {self._name} was traced for micro-batches of {piece.rows} rows and got "
                        f"{inputs[index].shape[0]}: the model's own code fixes the number. Use a size that divides the "
                        "batch, or list the model's submodules (units=[...]) instead of tracing"
                    )
        results = piece.graph(*inputs, *(state.get() for state in piece.states))
        return (*results, *[None] * (self._width - piece.n_results)) if self._width else results

    def place(self, device: torch.device) -> None:
        for state in self._states():
            value = state.get()
            if isinstance(value, nn.Parameter):
                value.data = value.data.to(device)
            elif isinstance(value, Tensor):
                setattr(state.owner, state.attribute, value.to(device))
        for piece in self._pieces.values():
            for node in piece.graph.graph.nodes:
                if "device" in node.kwargs and node.kwargs["device"] is not None:
                    node.kwargs = {**node.kwargs, "device": device}  # tracing burned the old one in
            piece.graph.recompile()

    def owners(self) -> Iterator[nn.Module]:
        yield from dict.fromkeys(state.owner for state in self._states() if isinstance(state.owner, nn.Module))

    def tensors(self) -> Iterator[Tensor]:
        for state in self._states():
            value = state.get()
            if isinstance(value, Tensor):
                yield value

    def _states(self) -> list[_State]:
        return list({(id(s.owner), s.attribute): s for piece in self._pieces.values() for s in piece.states}.values())

    def _mode(self) -> bool:
        for mode, piece in self._pieces.items():
            if all(module.training == flag for module, flag in piece.modes):
                return mode
        mixed = [type(module).__name__ for module, flag in self._pieces[True].modes if module.training != flag]
        raise ValueError(
            f"stage {self._name} was traced in training and in eval mode, and its modules are in neither as a whole (in "
            f"another mode than for training: {', '.join(mixed)}): call train() or eval() on the pipeline, set single "
            "modules' modes before it is built, or list the submodules (units=[...]) instead of tracing"
        )


# -- tracing ----------------------------------------------------------------------------------------------------------


def _trace(model: nn.Module, example: tuple[Any, ...], mode: bool, dynamic: bool) -> fx.GraphModule:
    shapes: Any = None
    if dynamic:
        shapes = pytree.tree_map(
            lambda leaf: {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.ndim else None, example
        )
    with _in_mode(model, mode), undone(model), torch.random.fork_rng():
        try:
            exported = torch.export.export(model, example, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be traced by torch.export ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}): list its submodules in the order they run (units=[...]), or append "
                "modules to a ModelPipeline by hand"
            ) from error
        module: Any = exported.module()
    return module


@contextmanager
def _in_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """All of the model in eval mode; or, to train, as it is (frozen parts stay so) unless it is in eval mode as a whole."""
    flags = [(module, module.training) for module in model.modules()]
    if not (mode and model.training):
        model.train(mode)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _name_units(model: nn.Module, traced: fx.GraphModule) -> tuple[list[str], dict[fx.Node, int]]:
    known = {name for name, _ in model.named_modules()}
    containers = _containers(model)
    names: list[str] = []
    assigned: dict[fx.Node, int] = {}
    for node in _computing(traced):
        name = _block(node, known, containers)
        if name is not None and name not in names:
            names.append(name)
        position = names.index(name) if name is not None else len(names) - 1
        assigned[node] = max(position, max(assigned.values(), default=0), 0)
    return names or ["model"], assigned


def _assign(model: nn.Module, traced: fx.GraphModule, names: Sequence[str]) -> dict[fx.Node, int]:
    """The units found in training, found again in the eval graph, where some have no node."""
    known = {name for name, _ in model.named_modules()}
    containers = _containers(model)
    current = 0
    assigned = {}
    for node in _computing(traced):
        name = _block(node, known, containers)
        if name in names:
            current = max(current, names.index(name))
        assigned[node] = current
    return assigned


def _computing(traced: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in traced.graph.nodes
        if node.op == "call_function" or (node.op == "call_module" and not str(node.target).startswith("_guards"))
    ]


def _graph(traced: fx.GraphModule, unit: dict[fx.Node, int]) -> _Graph:
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    rows = next(
        (
            node.meta["val"].shape[0]
            for node in inputs
            if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].ndim
        ),
        None,
    )
    result: Any = output.args[0]
    codegen: Any = traced.graph._codegen
    spec = codegen.pytree_info.out_spec
    leaves = result if isinstance(result, (list, tuple)) else (result,)
    structured = pytree.tree_unflatten(list(leaves), spec)
    return _Graph(
        traced,
        tuple(_computing(traced)),
        {**dict.fromkeys(inputs, -1), **unit},
        structured,
        int(rows) if rows is not None and is_concrete_int(rows) else None,
    )


def _containers(model: nn.Module) -> set[str]:
    """The names of modules that only hold blocks (rule 2)."""
    return {name for name, module in model.named_modules() if not name or _holds_blocks(module)}


def _holds_blocks(module: nn.Module) -> bool:
    if type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return True
    for part in module.modules():
        if part is not module and isinstance(part, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            kinds = {type(child) for child in part.children()}
            if len(kinds) == 1 and len(part) > 1 and not next(iter(kinds)).__module__.startswith("torch.nn."):
                return True
    return False


def _block(node: fx.Node, known: set[str], containers: set[str]) -> str | None:
    """The outermost module around a node that is no container."""
    stack = node.meta.get("nn_module_stack") or {}
    for name, *_ in stack.values():
        if name in known and name not in containers:
            return str(name)
    return None


# -- cutting ----------------------------------------------------------------------------------------------------------


def _cut(
    model: nn.Module, graph: _Graph, bounds: Sequence[int], relay: bool, mode: bool
) -> list[tuple[_Piece, list[Take]]]:
    n = len(bounds) - 1
    stage_of_unit = [next(k for k in range(n) if unit < bounds[k + 1]) for unit in range(bounds[-1])]
    home = {node: -1 if unit < 0 else stage_of_unit[unit] for node, unit in graph.unit.items()}
    last_use: dict[fx.Node, int] = {}
    uses: dict[int, dict[fx.Node, None]] = {k: {} for k in range(n)}
    for node in graph.nodes:
        for value in node.all_input_nodes:
            if value in home:
                last_use[value] = max(last_use.get(value, -1), home[node])
                uses[home[node]][value] = None
    final = [leaf for leaf in pytree.tree_leaves(graph.result) if isinstance(leaf, fx.Node)]
    for leaf in final:
        if leaf in home:
            last_use[leaf] = n  # the caller
            uses[n - 1][leaf] = None
    order = list(home)
    pieces: list[tuple[_Piece, list[Take]]] = []
    sent: list[list[fx.Node]] = []
    inputs = [node for node in order if home[node] == -1]
    for k in range(n):
        needed = [v for v in order if v in uses[k] and home[v] < k]
        incoming = (inputs if k == 0 else sent[-1]) if relay else needed
        outgoing = (
            [v for v in order if home[v] <= k < last_use.get(v, -1) and (home[v] == k or relay)] if k < n - 1 else []
        )
        sent.append(outgoing)
        takes: list[Take] = []
        for value in incoming:
            if home[value] == -1:
                takes.append(("input", inputs.index(value)))
            else:
                takes.append((home[value], sent[home[value]].index(value)) if not relay else "previous")
        piece = _piece(model, graph, k, home, incoming, outgoing, k == n - 1, mode)
        pieces.append((piece, takes))
    return pieces


def _piece(
    model: nn.Module,
    whole: _Graph,
    stage: int,
    home: dict[fx.Node, int],
    incoming: Sequence[fx.Node],
    outgoing: Sequence[fx.Node],
    is_last: bool,
    mode: bool,
) -> _Piece:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    mine = [node for node in whole.nodes if home[node] == stage]
    for value in incoming:
        new[value] = graph.placeholder(f"from_{value.name}")
    states: list[_State] = []
    final = [leaf for leaf in pytree.tree_leaves(whole.result) if isinstance(leaf, fx.Node)] if is_last else []
    attributes = dict.fromkeys(v for node in mine for v in node.all_input_nodes if v.op == "get_attr")
    attributes.update(dict.fromkeys(leaf for leaf in final if leaf.op == "get_attr"))
    for value in attributes:
        new[value] = graph.placeholder(f"state_{value.name}")
        states.append(_find(model, whole.module, str(value.target)))
    for node in mine:
        new[node] = graph.node_copy(node, lambda value: new[value])
    if is_last:
        graph.output(pytree.tree_map(lambda leaf: new[leaf] if isinstance(leaf, fx.Node) else leaf, whole.result))
    else:
        graph.output(tuple(new[value] for value in outgoing))
    graph.lint()
    holders = [model, *(m for node in mine for m in _modules_of(model, node))]
    with _in_mode(model, mode):
        modes = tuple((module, module.training) for module in dict.fromkeys(holders))
    root_inputs = tuple(index for index, value in enumerate(incoming) if home[value] == -1)
    n_results = 0 if is_last else len(outgoing)
    return _Piece(fx.GraphModule(nn.Module(), graph), tuple(states), modes, whole.rows, root_inputs, n_results)


def _find(model: nn.Module, traced: fx.GraphModule, target: str) -> _State:
    owner_name, _, attribute = target.rpartition(".")
    for root in (model, traced):
        try:
            owner = root.get_submodule(owner_name)
        except AttributeError:
            continue
        if attribute in owner._parameters or attribute in owner._buffers or attribute in vars(owner):
            return _State(owner, attribute)
        if attribute in owner._modules:
            return _State(owner, attribute)
    raise ValueError(f"the trace uses {target!r}, which neither the model nor the trace holds")


def _modules_of(model: nn.Module, node: fx.Node) -> Iterator[nn.Module]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if stack:
        try:
            yield model.get_submodule(str(stack[-1][0]))
        except AttributeError:
            return
