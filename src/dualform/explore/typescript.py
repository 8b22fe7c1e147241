"""The explorer's JSON contract as TypeScript: the contract is read, not run.

    python src/dualform/explore/typescript.py            prints it
    python src/dualform/explore/typescript.py --write    writes it where it is used

It needs nothing but the standard library, so it also works before the package is installed.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PARTS = ("attention_contract.py", "contract.py", "report_contract.py")
CONTRACT = [Path(__file__).with_name(name) for name in PARTS]
BEGIN = "// Made from src/dualform/explore/contract.py by `make format`: change it there."
PLAIN = {"int": "number", "float": "number", "str": "string", "bool": "boolean", "None": "null"}


def typescript(contract: str | None = None) -> str:
    """The contract's types in TypeScript, in the same order.

    >>> print(typescript("class Card(TypedDict):\\n    label: int | None").partition("export ")[2])
    interface Card {
      label: number | null
    }
    ...
    """
    if contract is None:
        contract = "\n".join(path.read_text("utf-8") for path in CONTRACT)
    parts = [BEGIN]
    for node in ast.parse(contract).body:
        if isinstance(node, ast.ClassDef):
            parts.append(_interface(node))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            parts.append(f"export type {ast.unparse(node.target)} = {_type(node.value)}")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            _, fields = node.value.args
            assert isinstance(fields, ast.Dict)
            pairs = zip(fields.keys, fields.values, strict=True)
            lines = [f"  {ast.literal_eval(name or '')}: {_type(kind)}" for name, kind in pairs]
            name = ast.unparse(node.targets[0])
            parts.append("\n".join([f"export interface {name} {{", *lines, "}"]))
    return "\n\n".join([*parts, "export type ViewName = keyof Views"]) + "\n"


def _interface(node: ast.ClassDef) -> str:
    bases = [name for base in node.bases if (name := ast.unparse(base)) != "TypedDict"]
    optional = "?" if any(keyword.arg == "total" for keyword in node.keywords) else ""
    extends = f" extends {', '.join(bases)}" if bases else ""
    lines = [f"export interface {node.name}{extends} {{"]
    if text := ast.get_docstring(node):
        lines.insert(0, f"/** {text} */")
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            if isinstance(below, ast.Expr):
                lines.append(f"  /** {' '.join(ast.literal_eval(below.value).split())} */")
            name = ast.unparse(field.target)
            lines.append(f"  {name}{optional}: {_type(field.annotation)}")
    return "\n".join([*lines, "}"])


def _type(kind: ast.expr) -> str:
    """A type of Python's as TypeScript writes it.

    >>> _type(ast.parse("dict[str, list[int | None]]", mode="eval").body)
    'Record<string, (number | null)[]>'
    """
    if isinstance(kind, ast.BinOp):
        return f"{_type(kind.left)} | {_type(kind.right)}"
    if not isinstance(kind, ast.Subscript):
        return PLAIN.get(ast.unparse(kind), ast.unparse(kind))
    inside = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if ast.unparse(kind.value) == "Literal":
        return " | ".join(f'"{ast.literal_eval(word)}"' for word in inside)
    parts = [_type(part) for part in inside]
    if ast.unparse(kind.value) == "dict":
        return f"Record<{', '.join(parts)}>"
    if ast.unparse(kind.value) == "tuple":
        return f"[{', '.join(parts)}]"
    return f"({parts[0]})[]" if " | " in parts[0] else f"{parts[0]}[]"


def written(root: Path) -> dict[Path, str]:
    """The files that hold the contract as TypeScript, and what they must hold."""
    page = root / "docs/explorer-api.md"
    before, fence, rest = page.read_text("utf-8").partition("```ts\n")
    _, end, after = rest.partition("```\n")
    listing = before + fence + typescript() + end + after
    return {root / "frontend/src/contract.ts": typescript(), page: listing}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for path, text in written(Path(__file__).parents[3]).items():
            if not path.exists() or path.read_text("utf-8") != text:  # a new date builds anew
                path.write_text(text, "utf-8")
    else:
        sys.stdout.write(typescript())
