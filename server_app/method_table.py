"""The README's table of methods, from the registries: `python -m server_app.method_table`."""

from client_app.methods import METHODS, method_of
from models import build_model
from protocol.config import resolve_config
from protocol.messages import Arrays
from strategies import strategy_for

columns = ("method", "paper", "regularises", "kept on the client", "traffic", "extra forwards")


def traffic(name: str) -> float:
    """Arrays sent and received in a round, in bytes, relative to FedAvg's, on cnn-fedintr."""
    config = resolve_config({"method": name, "model": "cnn-fedintr"})
    parts = method_of(config).model_parts()
    plain, own = (
        build_model(
            "cnn-fedintr",
            num_classes=10,
            channels=3,
            image_size=32,
            projection=projection,
            projection_heads=projection_heads,
        )
        for projection, projection_heads in (
            ("none", False),
            (parts.projection, parts.projection_heads),
        )
    )
    strategy = strategy_for(config, own)
    model = strategy.initial_arrays(own)
    down = [model, strategy.extra_like()]
    up = [strategy.expected(model), strategy.expected_extra()]
    fedavg = 2 * size_bytes(plain.state_dict())
    return sum(size_bytes(arrays) for arrays in down + up) / fedavg


def size_bytes(arrays: Arrays) -> int:
    """Bytes of the numbers in these arrays."""
    return sum(array.numel() * array.element_size() for array in arrays.values())


def method_table() -> str:
    """Markdown: one row a method, in the order of the registry."""
    rows = [columns, ("---",) * len(columns)]
    for name, cls in METHODS.items():
        mark = f"`{name}`" + (" (personal)" if cls.is_personal else "")
        cells = (cls.paper, cls.regularises, cls.keeps, f"{traffic(name):.2f}")
        rows.append((mark, *cells, cls.extra_forwards))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(method_table())
