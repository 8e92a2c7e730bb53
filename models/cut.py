"""Cuts a network that is no chain of stages into one: methods then read and split it as Keel's own.

torch.fx records what the network computes, as a graph. A stage ends where exactly one tensor passes
to the rest; its name is that of the module which it begins with. By default stages are the modules
of the network itself that have weights beside norms. While these are fewer than three, the largest
is divided into its own modules, and while fewer than four, the largest nn.Sequential. `staged`
names others.
"""

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from models.staged import Stage, Trunk
from protocol.text import in_one_line

MIN_STAGES = 3
MIN_DIVIDED = 4  # stages, before an nn.Sequential is a stage
RESERVED = ("features", "logits", "projection")  # names of layers
STAGES = "keel_stages"  # attribute of a network: what `staged` named
ACTIVATIONS = {"relu", "relu_", "relu6", "gelu", "silu", "elu", "leaky_relu", "hardswish", "tanh"}
TORCH = str(Path(torch.__file__).parent)


class CutError(ValueError):
    """A network that cannot be cut, as one line without its name."""


def staged(network: nn.Module, stages: Sequence[str]) -> nn.Module:
    """The network, to be cut at these modules instead of at those that Keel would choose.

    stages: paths of modules in the order in which they are called, such as "conv1" or "layer2.0".
    Each stage begins with its module and ends before the next one; the first has all before it.
    torch.fx does not look into these modules, so that they may have any control flow. ValueError
    for a path that the network does not have.
    """
    paths = [path for path, _ in network.named_modules()]
    for stage in stages:
        if stage not in paths[1:]:
            raise ValueError(
                f"stages = {list(stages)!r}: {type(network).__name__} has no {stage!r}"
            )
    setattr(network, STAGES, tuple(stages))
    return network


def cut(network: nn.Module, example: Tensor) -> Trunk:
    """The network as a trunk with its classifier. It is changed, so give a copy.

    example: a batch of images that it takes. CutError naming the place where it cannot be cut.
    """
    network.eval()
    with torch.no_grad():
        expected = network(example)  # makes the weights of lazy modules
    if not isinstance(expected, Tensor):
        raise CutError(f"returns {type(expected).__name__}: expected one tensor, the logits")
    freeze_into_buffers(network)
    named = getattr(network, STAGES, ())
    trunk = Cutter(network, recorded(network, named)).trunk(named)
    check(trunk, example, expected)
    return trunk


def freeze_into_buffers(network: nn.Module) -> None:
    """Parameters without gradient become buffers: local training trains every parameter."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.data)


# --- recording ------------------------------------------------------------------------------------


class OneInput(nn.Module):
    """The network, called with an image batch and nothing else."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """What the network returns."""
        out: Tensor = self.network(x)
        return out


class Recorder(fx.Tracer):  # type: ignore[misc]  # torch does not annotate it
    """Records a network; the modules at these paths are called, not looked into."""

    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self.leaves = {f"network.{path}" for path in leaves}

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        """Whether the module is one node of the graph."""
        return path in self.leaves or super().is_leaf_module(module, path)


def recorded(network: nn.Module, leaves: Sequence[str]) -> fx.Graph:
    """What the network computes, in training and in evaluation.

    Arguments that differ, as in `F.dropout(x, training=self.training)`, become the attribute
    `training` of the module that executes the graph.
    """
    in_training, in_evaluation = (graph_of(network.train(mode), leaves) for mode in (True, False))
    same_length = len(in_training.nodes) == len(in_evaluation.nodes)
    for node, other in list(zip(in_training.nodes, in_evaluation.nodes, strict=False)):
        pairs = zip(values_of(node), values_of(other), strict=False)
        is_flag = [a is True and b is False for a, b in pairs]
        if not same_length or shape_of(node, is_flag) != shape_of(other, is_flag):
            raise CutError(
                f"computes other things in evaluation than in training, from {node.name} on: use "
                "modules such as nn.Dropout"
            )
        if any(is_flag):
            with in_training.inserting_before(node):
                training = in_training.create_node("get_attr", "training")
            flags = iter(is_flag)
            node.args = tuple(training if next(flags) else a for a in node.args)
            node.kwargs = {k: training if next(flags) else v for k, v in node.kwargs.items()}
    return in_training


def values_of(node: fx.Node) -> list[object]:
    """The arguments of a node, those without a name first."""
    return [*node.args, *node.kwargs.values()]


def shape_of(node: fx.Node, is_flag: list[bool]) -> tuple[str, ...]:
    """What a node does, with its arguments but for those that are flags."""
    values = zip(values_of(node), is_flag, strict=False)
    return node.op, str(node.target), *(str(value) for value, flag in values if not flag)


def graph_of(network: nn.Module, leaves: Sequence[str]) -> fx.Graph:
    """The graph of one mode, with the network's own paths. CutError with the file and line."""
    try:
        graph = Recorder(leaves).trace(OneInput(network))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not f.filename.startswith(TORCH) and f.filename != __file__]
        place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        raise CutError(
            f"{place}torch.fx cannot record it ({in_one_line(error, 120)}): name modules around "
            "this place, with keel.staged(network, [...])"
        ) from error
    graph.eliminate_dead_code(has_effect)
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = node.target.removeprefix("network.")
    return graph


def has_effect(node: fx.Node) -> bool:
    """Whether a node does something beside its result: a check, or a change in place."""
    called = str(getattr(node.target, "__name__", node.target))
    is_change = called.endswith("_") or called in ("setitem", "iadd", "imul", "isub")
    return node.op in ("placeholder", "output") or "assert" in called or is_change


# --- cutting --------------------------------------------------------------------------------------


class Cutter:
    """Cuts a recorded network."""

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        """CutError unless it ends in a linear layer."""
        self.network = network
        *self.nodes, output = graph.nodes
        last = output.args[0]
        head = network.get_submodule(str(last.target)) if is_call(last) else None
        if not isinstance(head, nn.Linear):
            target = last.target if isinstance(last, fx.Node) else type(last)
            what = getattr(target, "__name__", target)
            raise CutError(f"ends in {what}: expected an nn.Linear, whose outputs are the logits")
        self.head, self.head_path = head, str(last.target)
        self.nodes.remove(last)
        places = {node: place for place, node in enumerate(self.nodes)}
        end = len(self.nodes)  # the place of the head
        self.last_use = [
            max((places.get(user, end) for user in node.users), default=-1) for node in self.nodes
        ]
        self.state = [{id(t) for t in state_of(network, node)} for node in self.nodes]

    def trunk(self, named: Sequence[str]) -> Trunk:
        """The stages between the cuts, and what is between the last weights and the head."""
        starts = self.named_starts(named) if named else self.chosen_starts()
        ends = [*list(starts.values())[1:], len(self.nodes)]
        stages, names = dict[str, Stage](), dict[str, str]()
        features: nn.Module = nn.Identity()
        begin = 1  # after the images
        for path, end in zip(starts, ends, strict=True):
            middle = self.end_of_weights(begin, end)
            stop = end if end < len(self.nodes) else self.end_of_activation(middle, end)
            name = path.replace(".", "_")
            name = f"{name}_" if name in RESERVED else name
            stages[name] = Stage(self.part(begin, middle), self.part(middle, stop))
            for half, module in stages[name].named_children():
                names |= {key: f"stages.{name}.{half}.{key}" for key in module.state_dict()}
            features, begin = self.part(stop, end), end
        names |= {f"{self.head_path}.{k}": f"classifier.{k}" for k in self.head.state_dict()}
        return Trunk(stages, features, self.head.in_features, self.head, names)

    def named_starts(self, named: Sequence[str]) -> dict[str, int]:
        """The place at which each of these modules begins. CutError unless a cut is possible."""
        starts: dict[str, int] = {}
        for path in named:
            inside = [n for n, node in enumerate(self.nodes) if is_within(path_of(node), path)]
            if not inside or (starts and inside[0] <= max(starts.values())):
                raise CutError(f"stage {path!r} is not called, or called before another: reorder")
            if starts and (why := self.obstacle(inside[0])):
                raise CutError(f"cannot be cut before {path!r}: {why}")
            starts[path] = inside[0]
        return starts

    def chosen_starts(self) -> dict[str, int]:
        """The modules that begin the stages, and where; {"input": ...} where none has weights."""
        parents = self.head_path.split(".")[:-1]
        divided = {"", *(".".join(parents[: n + 1]) for n in range(len(parents)))}
        while True:
            starts, obstacles = self.starts_of(divided)
            sizes = {p: self.size(p) for p in starts if self.is_divided(p, len(starts))}
            if not sizes:
                break
            divided.add(max(sizes, key=sizes.__getitem__))
        if len(starts) == 1 and obstacles:
            raise CutError(f"cannot be cut before {obstacles[0]}")
        return starts or {"input": 1}

    def starts_of(self, divided: set[str]) -> tuple[dict[str, int], list[str]]:
        """Where stages begin if these modules are divided, and where they could not."""
        starts, obstacles, current = dict[str, int](), list[str](), ""
        for place, node in enumerate(self.nodes):
            path = undivided(path_of(node), divided)
            if not path or path == current or not self.has_weights(path):
                continue
            current = path
            if starts and (why := self.obstacle(place)):
                obstacles.append(f"{path!r}: {why}")
            elif path not in starts:
                starts[path] = place
        return starts, obstacles

    def has_weights(self, path: str) -> bool:
        """Whether a module has weights beside the vectors of norms."""
        return any(p.dim() >= 2 for p in self.network.get_submodule(path).parameters())

    def is_divided(self, path: str, num_stages: int) -> bool:
        """Whether a stage is divided further where there are so many. Not what is one node."""
        is_row = isinstance(self.network.get_submodule(path), nn.Sequential)
        if num_stages >= (MIN_DIVIDED if is_row else MIN_STAGES):
            return False
        return any(path_of(node).startswith(f"{path}.") for node in self.nodes)

    def size(self, path: str) -> int:
        """The number of the module's parameters."""
        return sum(p.numel() for p in self.network.get_submodule(path).parameters())

    def passing(self, place: int) -> list[fx.Node]:
        """The values from before the place that are used from it on."""
        return [self.nodes[n] for n in range(place) if self.last_use[n] >= place]

    def obstacle(self, place: int) -> str:
        """Why the graph cannot be cut before this place; "" if it can."""
        names = [node.name for node in self.passing(place)]
        if len(names) != 1:
            return f"{len(names)} values pass there, {', '.join(names[:3])}: expected one tensor"
        if set().union(*self.state[:place]) & set().union(*self.state[place:]):
            return "the modules before it are used after it again"
        return ""

    def end_of_weights(self, begin: int, end: int) -> int:
        """The first cut after the last weights of a stage."""
        last = max((n for n in range(begin, end) if self.state[n]), default=begin - 1)
        return next((n for n in range(last + 1, end) if not self.obstacle(n)), end)

    def end_of_activation(self, begin: int, end: int) -> int:
        """After the last activation of the last stage: pooling and flattening follow it."""
        places = [n for n in range(begin, end) if is_activation(self.network, self.nodes[n])]
        after = places[-1] + 1 if places else begin
        return after if after == end or not self.obstacle(after) else begin

    def part(self, begin: int, end: int) -> nn.Module:
        """A module that computes the nodes from one cut to another."""
        if begin == end:
            return nn.Identity()
        graph = fx.Graph()
        (source,) = self.passing(begin)
        made = {source: graph.placeholder("x")}
        may_alias = True  # what comes before the first weights may return its input, as Identity
        for node, state in zip(self.nodes[begin:end], self.state[begin:end], strict=True):
            copied = made[node] = graph.node_copy(node, made.__getitem__)
            if may_alias or source in node.all_input_nodes:
                keep_input(self.network, copied)
            may_alias = may_alias and not state
        (result,) = self.passing(end)
        graph.output(made[result])
        made_of_it: nn.Module = fx.GraphModule(self.network, graph)
        return made_of_it


def is_call(node: object) -> bool:
    """Whether a node calls a module."""
    return isinstance(node, fx.Node) and node.op == "call_module"


def path_of(node: fx.Node) -> str:
    """The path of the module that a node calls, or that computes it; "" for the network itself."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("network").removeprefix(".")


def is_within(path: str, module: str) -> bool:
    """Whether a path is that of the module, or of one in it."""
    return path == module or path.startswith(f"{module}.")


def undivided(path: str, divided: set[str]) -> str:
    """The outermost module of a path that is not divided; "" if all are."""
    parts = path.split(".")
    prefixes = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return next((prefix for prefix in prefixes if prefix not in divided), "")


def state_of(network: nn.Module, node: fx.Node) -> Iterator[Tensor]:
    """The parameters and buffers that a node reads."""
    if node.op == "call_module":
        module = network.get_submodule(str(node.target))
        yield from module.parameters()
        yield from module.buffers()
    elif node.op == "get_attr" and node.target != "training":
        path, _, name = str(node.target).rpartition(".")
        yield getattr(network.get_submodule(path), name)


def is_activation(network: nn.Module, node: fx.Node) -> bool:
    """Whether a node applies an activation."""
    if node.op == "call_module":
        return type(network.get_submodule(str(node.target))).__module__ == nn.ReLU.__module__
    return getattr(node.target, "__name__", node.target) in ACTIVATIONS


def keep_input(network: nn.Module, node: fx.Node) -> None:
    """Have a node leave its input as it is, which methods read: ReLU(inplace=True) is ReLU()."""
    if node.op == "call_module":
        module = network.get_submodule(str(node.target))
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    elif node.kwargs.get("inplace") is True:
        node.update_kwarg("inplace", False)


def check(trunk: Trunk, example: Tensor, expected: Tensor) -> None:
    """CutError unless the parts compute what the network does and do not change their inputs."""
    modules: dict[str, nn.Module] = {
        f"{half} of {name}": part
        for name, stage in trunk.stages.items()
        for half, part in stage.named_children()
    }
    x = example
    with torch.no_grad():
        for place, part in {**modules, "the pooling": trunk.to_features}.items():
            version, out = x._version, part.eval()(x)
            if x._version != version:
                raise CutError(f"the {place} changes its input in place, which methods read")
            x = out
        if tuple(x.shape) != (len(example), trunk.width):
            raise CutError(
                f"the input of its last layer is {list(x.shape)}: expected [B, features]"
            )
        assert trunk.classifier is not None
        if not torch.equal(trunk.classifier(x), expected):
            raise CutError("computes another thing than torch.fx recorded: is it random?")
