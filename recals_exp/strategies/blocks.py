"""The blocks of a model: the repeated modules that strategies by block treat one by one.

How they are found: the children of one class in one `Sequential`, `ModuleList` or `ModuleDict` are a run. The class with
the longest run wins (of two with equal runs the one with more parameters), and its blocks are all modules of that class
in such containers, in the order of the model. So a ResNet's blocks are found over its four stages, and a transformer's
are its layers and not the linear layers in them.

Rules the code follows:

1. Layers of torch.nn without children are no blocks: what they save is mostly their input, which is held anyway.
2. No block lies in another.
3. Where nothing repeats, the user names the blocks; a name is that of `named_modules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHOWN = 12

Block = tuple[str, nn.Module]


def choose_blocks(model: nn.Module, names: Sequence[str] | None, every: int, strategy: str) -> list[Block]:
    """Every `every`-th block of the model: of those named, or of those found. ValueError says what can be done."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"strategy.every={every!r} is not allowed: use a whole number of at least 1")
    blocks = find_blocks(model) if names is None else named_blocks(model, names)
    if not blocks:
        children = [name for name, module in model.named_modules() if name and "." not in name]
        raise ValueError(
            f"strategy={strategy}: no repeated blocks were found in {type(model).__name__} (two or more modules of one "
            "class in a Sequential, ModuleList or ModuleDict): name them with strategy.blocks=[NAME, ...], where NAME is "
            f"one of model.named_modules(), for example {_listing(children)}"
        )
    return blocks[::every]


def find_blocks(model: nn.Module) -> list[Block]:
    """The repeated blocks, by name, in the order of the model; empty if nothing repeats."""
    longest: Counter[type[nn.Module]] = Counter()
    members: dict[type[nn.Module], list[Block]] = {}
    for name, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        run: Counter[type[nn.Module]] = Counter()
        for child_name, child in container.named_children():
            if _may_be_block(child):
                run[type(child)] += 1
                members.setdefault(type(child), []).append((f"{name}.{child_name}" if name else child_name, child))
        longest |= run
    repeated = [kind for kind, length in longest.items() if length >= 2]
    if not repeated:
        return []
    kind = max(repeated, key=lambda kind: (longest[kind], _size(members[kind])))
    return _outermost(members[kind])


def named_blocks(model: nn.Module, names: Sequence[str]) -> list[Block]:
    """The modules of these names, in that order. ValueError lists the names that do not exist, and modules that do."""
    modules = dict(model.named_modules())
    if unknown := [name for name in names if name not in modules or not name]:
        raise ValueError(
            f"strategy.blocks names {', '.join(map(repr, unknown))}, which {type(model).__name__} does not have: use "
            f"names of model.named_modules(), such as {_listing([name for name in modules if name])}"
        )
    blocks = [(name, modules[name]) for name in names]
    if len(_outermost(blocks)) < len(blocks):
        raise ValueError(f"strategy.blocks={list(names)} names a module inside of another, or one twice: leave one out")
    return blocks


def _may_be_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn")


def _size(blocks: Sequence[Block]) -> int:
    return sum(parameter.numel() for _, module in blocks for parameter in module.parameters())


def _outermost(blocks: Sequence[Block]) -> list[Block]:
    """Without those inside of an earlier one, and each module once."""
    inner = {id(part) for _, module in blocks for part in module.modules() if part is not module}
    seen: set[int] = set()
    kept = []
    for name, module in blocks:
        if id(module) not in inner and id(module) not in seen:
            seen.add(id(module))
            kept.append((name, module))
    return kept


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "(it has no submodules)") + more
