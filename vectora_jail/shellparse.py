"""A shell command line → every command it would run, or the reason why that cannot be said (tree-sitter-bash).

Advice for approval, never a wall: containment does not depend on it. Only grammar nodes that are listed
here are understood; an unknown node, an error, an odd character or a missing library makes the whole line
"unparsed". The grammar accepts some things that shells read otherwise (`coproc`, `rm x;;`), so tokens and
command names are checked too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Longest line that is looked at, in bytes.
MAX_LINE = 64 * 1024
_MAX_DEPTH = 60

_BLOCKS = frozenset(
    {"program", "list", "pipeline", "negated_command", "subshell", "compound_statement", "if_statement"}
    | {
        "elif_clause",
        "else_clause",
        "while_statement",
        "for_statement",
        "do_group",
        "case_statement",
        "case_item",
    }
    | {"redirected_statement", "command_substitution", "process_substitution", "test_command"}
)
_EXPRESSIONS = frozenset(
    {
        "unary_expression",
        "binary_expression",
        "parenthesized_expression",
        "ternary_expression",
        "test_operator",
    }
    | {"postfix_expression", "number", "word", "raw_string", "string", "string_content", "concatenation"}
    | {"simple_expansion", "expansion", "arithmetic_expansion", "brace_expression", "variable_name", "regex"}
    | {"special_variable_name", "extglob_pattern", "ansi_c_string", "subscript", "array", "command_name"}
    | {"heredoc_start", "heredoc_body", "heredoc_content", "heredoc_end", "file_descriptor", "comment"}
    | {"file_redirect", "heredoc_redirect", "herestring_redirect"}
)
_TOKENS = frozenset(
    {"&&", "||", "|", "|&", ";", "&", "\n", "(", ")", "{", "}", "if", "then", "elif", "else", "fi", "while"}
    | {
        "until",
        "do",
        "done",
        "for",
        "in",
        "!",
        "[",
        "]",
        "[[",
        "]]",
        "$(",
        "`",
        "<(",
        ">(",
        ">",
        ">>",
        "<",
        "&>",
    }
    | {"&>>", ">&", "<&", ">|", "<<", "<<-", "<<<", "case", "esac", ")", '"', "$", "${", "$((", "((", "))"}
)
_ARITHMETIC = (
    "= == != =~ < > <= >= + - * / % ** ? : , ++ -- ~ ^ << >> += -= *= /= %= :- :+ :? # ## %% // /# /% ^^ ,, !"
)
_OPERATORS = frozenset(_ARITHMETIC.split())
_KEYWORDS = frozenset(
    {"coproc", "select", "function", "then", "do", "done", "fi", "esac", "in", "elif", "else", "if", "while"}
    | {"until", "for", "case", "{", "}", "!", "[[", "((", "time", "-p"}
)


class Unparsed(Exception):
    """The line has no certain reading; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; what is not static is known only when the command runs."""

    text: str
    static: bool = True


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command, with what stands around it."""

    words: tuple[Word, ...]
    assigns: tuple[str, ...] = ()
    """Names of the variables that are set for it."""
    writes: tuple[Word, ...] = ()
    """Files that its redirections write."""
    after_pipe: bool = False
    """True when its standard input is the output of another command."""

    @property
    def argv(self) -> tuple[str, ...]:
        """Give the words as text; a word that is not static shows its source."""
        return tuple(word.text for word in self.words)

    @property
    def static(self) -> bool:
        """Tell whether every word is known."""
        return all(word.static for word in self.words)


@dataclass(slots=True)
class Line:
    """All simple commands of a line, in order, and what makes it more than a list of commands."""

    commands: list[Simple]
    functions: list[str]
    assigns: list[str]


def parse_line(text: str) -> Line:
    """Find every command that a line runs; raises Unparsed."""
    for char in text:
        if (char.isspace() and char not in " \t\n") or (not char.isprintable() and char not in "\t\n"):
            raise Unparsed(f"the character {char!r}")
    source = text.encode("utf-8", "surrogatepass")
    if len(source) > MAX_LINE:
        raise Unparsed("the line is too long")
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError:
        raise Unparsed("the extra vectora-jail[approval] is not installed") from None
    tree = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(source)
    if tree.root_node.has_error:
        raise Unparsed("a syntax error")
    walk = _Walk()
    walk.visit(tree.root_node, 0)
    return walk.line


class _Walk:
    def __init__(self) -> None:
        self.line = Line([], [], [])

    def visit(self, node: Any, depth: int, writes: tuple[Word, ...] = (), piped: bool = False) -> None:
        """Take in one node; every node type is either understood or refused."""
        if depth > _MAX_DEPTH:
            raise Unparsed("nested too deeply")
        if node.is_missing or node.is_error:
            raise Unparsed("a syntax error")
        kind = node.type
        if not node.is_named:
            # `rm x;;` passes the grammar anywhere; shells know it only between the items of a case.
            ends_item = kind == ";;" and node.parent is not None and node.parent.type == "case_item"
            if kind not in _TOKENS and kind not in _OPERATORS and not ends_item:
                raise Unparsed(f"the token {kind!r}")
        elif kind == "command":
            self._command(node, depth, writes, piped)
        elif kind in ("declaration_command", "unset_command"):
            self._declaration(node, depth)
        elif kind == "variable_assignment":
            self.line.assigns.append(_text(node.child_by_field_name("name")))
            self._children(node, depth)
        elif kind == "function_definition":
            self.line.functions.append(_text(node.child_by_field_name("name")))
            self.visit(node.child_by_field_name("body"), depth + 1)
        elif kind == "redirected_statement":
            inner = writes + tuple(word for child in node.children for word in self._redirect(child, depth))
            body = node.child_by_field_name("body")
            if body is None:
                raise Unparsed("a redirection without a command")
            self.visit(body, depth + 1, inner, piped)
        elif kind == "for_statement":
            name = _text(node.child_by_field_name("variable"))
            if not name.islower():
                self.line.assigns.append(name)  # `for PATH in /tmp` changes what later commands are
            self._children(node, depth)
        elif kind == "test_command" and any(mark in _text(node) for mark in ("$(", "`")):
            # Inside [[ ]] an array index is evaluated, also one that stands in quotes: [[ -v 'a[$(id)]' ]].
            raise Unparsed("a command inside a test")
        elif kind == "pipeline":
            first = True
            for child in node.children:
                self.visit(child, depth + 1, writes, piped or not first)
                first = first and not child.is_named
        elif kind in _BLOCKS or kind in _EXPRESSIONS or kind == "variable_assignments":
            for child in node.children:
                self.visit(child, depth + 1, writes if kind in _BLOCKS else (), piped)
        else:
            raise Unparsed(f"{kind.replace('_', ' ')} is not understood")

    def _children(self, node: Any, depth: int) -> None:
        for child in node.children:
            self.visit(child, depth + 1)

    def _command(self, node: Any, depth: int, writes: tuple[Word, ...], piped: bool) -> None:
        words: list[Word] = []
        assigns: list[str] = []
        for child in node.children:
            if child.type == "variable_assignment":
                assigns.append(_text(child.child_by_field_name("name")))
                self._children(child, depth)
            elif child.type in ("file_redirect", "heredoc_redirect", "herestring_redirect"):
                writes += self._redirect(child, depth)
            else:
                words.append(self._word(child, depth))
        if not words:
            raise Unparsed("a command without a name")
        if words[0].text in _KEYWORDS - {"time"}:
            raise Unparsed(f"the keyword {words[0].text!r} where a command belongs")
        self.line.commands.append(Simple(tuple(words), tuple(assigns), writes, piped))

    def _declaration(self, node: Any, depth: int) -> None:
        words = []
        for child in node.children:
            if child.type == "variable_assignment":
                self.line.assigns.append(_text(child.child_by_field_name("name")))
                self._children(child, depth)
            words.append(
                Word(_text(child), static=child.type in ("word", "variable_name") or not child.is_named)
            )
        self.line.commands.append(Simple(tuple(words)))

    def _redirect(self, node: Any, depth: int) -> tuple[Word, ...]:
        """Give what a redirection writes; its words and bodies may hold commands too."""
        if node.type not in ("file_redirect", "heredoc_redirect", "herestring_redirect"):
            return ()
        if node.type != "file_redirect":
            self._children(node, depth)
            # In `cat <<EOF | sh` the grammar hangs the rest of the line below the here-document.
            return tuple(word for child in node.children for word in self._redirect(child, depth))
        operator = next((child.type for child in node.children if not child.is_named), "")
        words = [self._word(child, depth) for child in node.children if child.is_named]
        words = [word for word, child in zip(words, [c for c in node.children if c.is_named], strict=True)
                 if child.type != "file_descriptor"]  # fmt: skip
        if operator in ("<", "<&"):
            return ()
        if operator == ">&" and words and words[0].static and words[0].text in ("0", "1", "2", "-"):
            return ()
        if operator not in (">", ">>", "&>", "&>>", ">&", ">|"):
            raise Unparsed(f"the redirection {operator!r}")
        return tuple(word for word in words if not (word.static and word.text == "/dev/null"))

    def _word(self, node: Any, depth: int) -> Word:
        kind = node.type
        if kind == "command_name" and node.named_child_count == 1:
            return self._word(node.named_children[0], depth)
        if kind in ("word", "number", "file_descriptor") and not node.children:
            return _plain(_text(node))
        if kind == "raw_string":
            return Word(_text(node)[1:-1])
        if kind == "string" and all(child.type in ('"', "string_content") for child in node.children):
            return Word(_unquote(_text(node)[1:-1]))
        if kind == "concatenation":
            parts = [self._word(child, depth + 1) for child in node.children]
            return Word("".join(part.text for part in parts), all(part.static for part in parts))
        self.visit(node, depth + 1)
        return Word(_text(node), static=False)


def _text(node: Any) -> str:
    if node is None:
        raise Unparsed("a part without a name")
    return str(node.text.decode("utf-8", "surrogatepass"))


def _plain(text: str) -> Word:
    """Decode an unquoted word; globs and braces make it known only at run time."""
    out: list[str] = []
    static = True
    escaped = False
    for char in text:
        if escaped:
            if char != "\n":
                out.append(char)
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "$`'\"":
            raise Unparsed(f"{char!r} inside a word")
        else:
            static = static and (char not in "*?[]{}" or text in ("{}", "[", "]"))
            out.append(char)
    if escaped:
        raise Unparsed("a backslash at the end of a word")
    return Word("".join(out), static)


def _unquote(text: str) -> str:
    """Decode the inside of double quotes that hold no expansion (POSIX shell, 2.2.3)."""
    out: list[str] = []
    escaped = False
    for char in text:
        if escaped:
            out.append("" if char == "\n" else char if char in '$`"\\' else "\\" + char)
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            out.append(char)
    return "".join(out)
