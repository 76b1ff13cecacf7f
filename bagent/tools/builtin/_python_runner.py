"""Script that runs the Python code on stdin and prints the value of its last expression.

It is started by path in an isolated interpreter, and imports nothing of bagent.
"""

from __future__ import annotations

import ast
import sys


def main() -> None:
    """Run the code; an error ends the process with its traceback."""
    tree = ast.parse(sys.stdin.read(), "<code>")
    names: dict[str, object] = {"__name__": "__main__"}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compile(tree, "<code>", "exec")
    exec(statements, names)  # nosec B102 # that is the tool
    if isinstance(last, ast.Expr):
        code = compile(ast.Expression(last.value), "<code>", "eval")
        value = eval(code, names)  # nosec B307 # that is the tool
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


if __name__ == "__main__":
    main()
