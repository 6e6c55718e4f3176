"""Python that jinja2 makes of a template: its texts are marked as the template's own, and what grows is measured."""

from typing import Any

import jinja2.compiler
import jinja2.nodes

from assembler.traced import written


class TracingGenerator(jinja2.compiler.CodeGenerator):
    """jinja2's code generator, but constants are marked, and `~`, `+` and what is shown go through the environment."""

    environment: Any  # a TemplateEnvironment

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write(self._code(node.as_const(frame.eval_ctx)))

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if isinstance(node.arg, jinja2.nodes.Const):  # a key is never written; a plain one is found sooner
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(f", {node.arg.value!r})")
        else:
            super().visit_Getitem(node, frame)

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """All of `a + b + c` at once."""
        terms: list[jinja2.nodes.Expr] = []
        left: jinja2.nodes.Expr = node
        while isinstance(left, jinja2.nodes.Add):
            terms.append(left.right)
            left = left.left
        self._call("added", [left, *reversed(terms)], frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._call("joined", node.nodes, frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        operands = [operand.expr for operand in node.ops]
        if any(isinstance(each, jinja2.nodes.Const) for each in (node.expr, *operands)):  # over at once
            super().visit_Compare(node, frame)
            return
        self.write("(environment.compared(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f") {jinja2.compiler.operators[operand.op]} environment.compared(")
            self.visit(operand.expr, frame)
        self.write("))")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("{")
        for item in node.items:
            self.write("environment.compared(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _call(self, name: str, parts: list[jinja2.nodes.Expr], frame: jinja2.compiler.Frame) -> None:
        self.write(f"environment.{name}((")
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_child_pre(self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.shown(")

    def _output_const_repr(self, group: Any) -> str:
        return self._code("".join(group))

    def _code(self, value: Any) -> str:
        """Python for a constant."""
        if type(value) is str:
            self.environment.written.append(written(value))
            return f"environment.written[{len(self.environment.written) - 1}]"
        if type(value) is list:
            return f"[{', '.join(map(self._code, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._code(each) + ', ' for each in value)})"
        if type(value) is dict:
            return f"{{{', '.join(f'{self._code(key)}: {self._code(each)}' for key, each in value.items())}}}"
        return repr(value)
