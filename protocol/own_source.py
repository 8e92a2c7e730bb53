"""The source of objects of a notebook or script, and whether a module is still that of its file."""

import ast
import dis
import inspect
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from protocol.files import digest


def source_text(value: Any) -> str:
    """The source of a class or function, after that of what it uses of the same notebook or script.

    Of a value that is not code, such as a constant that a function reads, a digest stands for it:
    the text changes whenever the object does. "" if the source is not known, and for an object
    that is neither a class nor a function.
    """
    found: dict[str, str] = {}
    return "\n\n".join(found.values()) if is_code(value) and gather(value, found) else ""


def gather(value: Any, found: dict[str, str]) -> bool:
    """Add the source of this class or function, and of all it uses, by name; False if unknown."""
    name = value.__qualname__
    if name in found:
        return True
    found[name] = ""  # it may use itself
    used = {n: v for function in functions_of(value) for n, v in names_used(function).items()}
    if isinstance(value, type):
        used |= {base.__name__: base for base in value.__bases__} | attributes_of(value)
    for other, each in used.items():
        if not is_code(each):
            found[other] = f"# {other}: {digest(pickle_of(each))}"
        elif is_from_here(each) and not gather(each, found):
            return False
    text = source_of(value)
    found[name] = found.pop(name) or text  # after what it uses
    return bool(text)


def attributes_of(value: type) -> dict[str, Any]:
    """The attributes of a class that its own source may only name, such as a server half."""
    return {
        name: each
        for name, each in vars(value).items()
        if isinstance(each, type)
        or (
            not (name.startswith("__") or callable(each) or hasattr(each, "__get__"))
            and not isinstance(each, bool | int | float | str)
        )
    }


def is_code(value: Any) -> bool:
    """Whether it is a class or a function of Python."""
    return isinstance(value, type | FunctionType)


def is_from_here(value: Any) -> bool:
    """Whether no module has this class or function, so that a pickle holds it by value."""
    module = sys.modules.get(value.__module__)
    is_main = value.__module__ == "__main__"
    return is_main or getattr(module, value.__qualname__, None) is not value


def pickle_of(value: Any) -> bytes:
    """The pickle of a value."""
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def functions_of(value: Any) -> Iterator[FunctionType]:
    """The function, or those of the class."""
    if isinstance(value, FunctionType):
        yield inspect.unwrap(value)  # without a decorator, such as torch.no_grad()
        return
    for each in vars(value).values():
        parts = (each.fget, each.fset) if isinstance(each, property) else (each,)
        for part in parts:
            function = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else None
            # those that @dataclass adds are in the file <string>
            if isinstance(function, FunctionType) and function.__code__.co_filename != "<string>":
                yield function


def code_objects(value: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's functions."""
    if is_code(value):
        yield from (function.__code__ for function in functions_of(value))


def names_used(function: FunctionType) -> dict[str, Any]:
    """What a function reads of its module and of the functions around it, by name."""
    names = {name for code in codes_in(function.__code__) for name in globals_in(code)}
    used = {n: function.__globals__[n] for n in names if n in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    used |= {name: cell.cell_contents for name, cell in cells if name != "__class__"}
    return {name: used[name] for name in sorted(used) if not inspect.ismodule(used[name])}


def globals_in(code: CodeType) -> Iterator[str]:
    """The names of its module that the code reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code and all code within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def source_of(value: Any) -> str:
    """The source of a class or function; "" if it is not known."""
    try:
        return inspect.getsource(value).strip("\n")
    except (OSError, TypeError):  # of a class in a notebook, whose module has no file
        return source_of_class(value) if isinstance(value, type) else ""


def source_of_class(value: type) -> str:
    """The source of a class, found by the file or cell of one of its functions."""
    for code in {code.co_filename: code for code in code_objects(value)}.values():
        lines = linecache.getlines(code.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or node.name != value.__name__:
                continue
            if node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).strip("\n")
    return ""


def is_stale(module: ModuleType, text: str) -> bool:
    """Whether a function of the module is not in the text of its file."""
    path = str(module.__file__)
    try:
        current = set(codes_in(compile(text, path, "exec")))
    except SyntaxError:
        return True
    values = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    used = {code for value in values for code in code_objects(value)}
    return any(code.co_filename == path and code not in current for code in used)
