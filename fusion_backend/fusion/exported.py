"""Programs of ``torch.export``: the same program with another graph that computes the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node


def with_graph(program: ExportedProgram, graph_module: GraphModule) -> ExportedProgram:
    """A program with a rewritten graph, and the parameters, constants and shapes that it had.

    Args:
        program: is not changed; its tensors are shared.
        graph_module: has the inputs of the program's graph, and as many outputs in their order.

    Raises:
        torch.export's errors, where the graph is none of a program.
    """
    signature = copy.deepcopy(program.graph_signature)
    calls = copy.deepcopy(program.module_call_graph)
    outputs = zip(_outputs(program.graph), _outputs(graph_module.graph), strict=True)
    for before, after in dict(outputs).items():
        signature.replace_all_uses(before.name, after.name)
        for call in calls:
            if call.signature is not None:
                call.signature.replace_all_uses_with(before, after)
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def keep_names(before: Graph, after: Graph) -> None:
    """Call the nodes of a copied graph as they were called, which a signature refers to.

    ``torch.export`` names inputs as the model does. A copy has other names where those are Python's
    own, such as ``input``.
    """
    for node, copied in zip(before.nodes, after.nodes, strict=True):
        copied.name = node.name


def _outputs(graph: Graph) -> Iterator[Node]:
    """What a graph returns, without numbers."""
    returned = graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    return (value for value in returned if isinstance(value, Node))
