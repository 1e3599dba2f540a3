"""Passes over the graph of a step's program, before it is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from unidist.errors import CapabilityError

_LITERAL = torch.ops.aten.lift_fresh_copy.default
_MADE = (torch.ops.aten.empty.memory_format,)
_COPIES = (torch.ops.aten.copy_.default,)
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_POWERS = (torch.ops.aten.pow.Scalar, torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.pow.Tensor_Tensor)


def prepared(program: GraphModule) -> GraphModule:
    """Returns a program without what nobody uses, where each number is computed once.

    Raises:
        CapabilityError: it writes to a tensor that is none of its inputs.
    """
    roots = _roots(program.graph)
    if any(root.op == "get_attr" for node in program.graph.nodes for root in _written(node, roots)):
        raise CapabilityError("the step writes to a tensor that no variable of the model holds")
    _read_what_is_copied(program.graph, roots)
    program.graph.eliminate_dead_code()
    roots = _roots(program.graph)
    _share_numbers(program, roots)
    program.graph.eliminate_dead_code()
    _set_powers_apart(program)
    _keep_what_is_under_way(program.graph, roots)
    program.recompile()
    return program


def take_unused(program: GraphModule, count: int) -> list[int]:
    """Takes inputs that nobody uses off a program; returns which of the first `count` are left."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"][:count]
    for node in inputs:
        if not node.users:
            program.graph.erase_node(node)
    program.recompile()
    return [k for k, node in enumerate(inputs) if node.users]


def _keep_what_is_under_way(graph: Graph, roots: dict[Node, Node]) -> None:
    """Gives also what collectives read that go on behind the program.

    A compiler uses memory again behind its last reader, and knows of no wait in another program.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    given: Any = output.args[0]
    kept = []
    for node in given:
        if not isinstance(node, Node) or not _is_begun(node):
            continue
        read: Any = node.args[0]
        if roots.get(read, read).op == "placeholder":
            # An output that is a variable's memory would be the variable, which the program writes to.
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (read,))
            copy.meta["val"] = read.meta["val"]
            node.replace_input_with(read, copy)
            read = copy
        kept.append(read)
    output.args = ([*given, *kept],)


def _is_begun(node: Node) -> bool:
    target: Any = node.target
    is_collective = _is_operation(node) and target.namespace == "_c10d_functional"
    return is_collective and target is not torch.ops._c10d_functional.wait_tensor.default


def _given(node: Node) -> Iterator[tuple[Any, Node]]:
    schema = node.target._schema  # type: ignore[union-attr]
    said = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    for argument in schema.arguments:
        for given in pytree.tree_leaves(said.get(argument.name)):
            if isinstance(given, Node):
                yield argument, given


def _is_operation(node: Node) -> bool:
    return node.op == "call_function" and hasattr(node.target, "_schema")


def written_inputs(graph: Graph, since: int) -> list[int]:
    """Returns the inputs that operations behind the first `since` write to, amid a trace."""
    roots = _roots(graph)
    found = {root for node in list(graph.nodes)[since:] for root in _written(node, roots)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [k for k, node in enumerate(inputs) if node in found]


def _roots(graph: Graph) -> dict[Node, Node]:
    """Node -> the node whose memory it has."""
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        roots[node] = node
        for argument, given in _given(node) if _is_operation(node) else ():
            if argument.alias_info is not None:
                roots[node] = roots[given]
    return roots


def _read_what_is_copied(graph: Graph, roots: dict[Node, Node]) -> None:
    """Lets operations read what was copied into memory that the program makes, where it is copied whole.

    So it is with gathered values. A compiler would make the copies.
    """
    made = {root for root in roots.values() if root.target in _MADE}
    for node in graph.nodes:
        if not _copies_whole(node, roots):
            made.difference_update(_written(node, roots))
    now: dict[Node, Node] = {}
    known: dict[tuple[Node, Node], Node] = {}

    def seen(node: Node) -> Node:
        """The node on what its memory holds now."""
        held = now[roots[node]]
        if node is roots[node] or node.target in _COPIES:
            return held
        if (node, held) not in known:
            known[node, held] = graph.node_copy(node, lambda x: seen(x) if roots[x] in now else x)
        return known[node, held]

    copies = []
    for node in list(graph.nodes):
        if roots[node] in made and node.target in _COPIES:
            now[roots[node]] = node.args[1]
            copies.append(node)
        elif roots[node] not in now:
            for given in [x for x in node.all_input_nodes if roots[x] in now]:
                with graph.inserting_before(node):
                    node.replace_input_with(given, seen(given))
    graph.eliminate_dead_code(lambda node: node.is_impure() and node not in copies)


def _copies_whole(node: Node, roots: dict[Node, Node]) -> bool:
    into = node.args[0] if node.target in _COPIES else None
    while isinstance(into, Node) and into.target in _SAME:
        into = into.args[0]
    if not isinstance(into, Node) or into is not roots[node] or not isinstance(source := node.args[1], Node):
        return False
    wanted, found = into.meta["val"], source.meta["val"]
    # Views are of the strides of what is written to.
    alike = wanted.shape == found.shape and wanted.stride() == found.stride()
    return bool(alike and wanted.dtype == found.dtype)


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.ndim


def _written(node: Node, roots: dict[Node, Node]) -> list[Node]:
    found = _given(node) if _is_operation(node) else ()
    return [
        roots[given] for argument, given in found if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _share_numbers(program: GraphModule, roots: dict[Node, Node]) -> None:
    """Makes equal numbers one node: a step computes its rates anew for each variable."""
    changed = {root for node in program.graph.nodes for root in _written(node, roots)}
    versions: Counter[Node] = Counter()
    known: dict[Hashable, Node] = {}
    for node in list(program.graph.nodes):
        versions.update(_written(node, roots))
        if not _is_operation(node) or not _is_number(node) or node in changed or not _is_pure(node):
            continue
        key = _key(program, node, roots, versions)
        if key in known:
            node.replace_all_uses_with(known[key])
        elif key is not None:
            known[key] = node


def _is_pure(node: Node) -> bool:
    target: Any = node.target
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _key(program: GraphModule, node: Node, roots: dict[Node, Node], versions: Counter[Node]) -> Hashable:
    if node.target is _LITERAL and isinstance(node.args[0], Node) and node.args[0].op == "get_attr":
        literal = getattr(program, str(node.args[0].target))
        return None if literal.ndim else (_LITERAL, literal.dtype, literal.device, literal.item())
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    seen = tuple((x, versions[roots[x]]) if isinstance(x, Node) else (type(x), x) for x in leaves)
    try:
        hash(seen)
    except TypeError:
        return None
    return node.target, seen, repr(structure)


def _set_powers_apart(program: GraphModule) -> None:
    """Keeps powers out of loops over elements, where a compiler would compute them again and again."""
    from unidist.keras.torch.step import program_ops

    powers: set[Node] = set()
    for node in list(program.graph.nodes):
        if not _is_operation(node) or not _is_number(node):
            continue
        if node.target in _POWERS or powers.intersection(node.all_input_nodes):
            powers.add(node)
            looped = [user for user in node.users if not _is_number(user)]
            if looped:
                with program.graph.inserting_after(node):
                    apart = program.graph.call_function(program_ops.NUMBER, (node,))
                apart.meta["val"] = node.meta["val"]
                for user in looped:
                    user.replace_input_with(node, apart)
