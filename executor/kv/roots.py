"""The roots of the prefix tree: those that requests find by their scope, and those that nobody finds."""

from collections.abc import Iterator

from executor.kv.node import Root, Scope


class Roots:
    """All roots. Written by `PrefixTree` alone, which sees to it that none goes while nodes hang below it."""

    def __init__(self) -> None:
        self._by_scope: dict[Scope, Root] = {}  # least recently entered first
        self._anonymous: set[Root] = set()

    def __iter__(self) -> Iterator[Root]:
        """Those that can be found, least recently entered first, then the anonymous ones."""
        return iter((*self._by_scope.values(), *self._anonymous))

    def __len__(self) -> int:
        return len(self._by_scope) + len(self._anonymous)

    @property
    def found(self) -> int:
        """How many of them can be found."""
        return len(self._by_scope)

    def find(self, scope: Scope) -> Root | None:
        """The root of a scope, if there is one."""
        return self._by_scope.get(scope)

    def of(self, namespace: str | None) -> list[Root]:
        """The roots of a namespace that can be found, least recently entered first; of all namespaces for None."""
        return [root for root in self._by_scope.values() if namespace in (None, root.scope.namespace)]

    def idle(self) -> Root | None:
        """The least recently entered one that can be found, and that nobody holds anything of."""
        roots = self._by_scope.values()
        return next((r for r in roots if not r.references and not any(child.is_held for child in r.children)), None)

    def enter(self, scope: Scope) -> Root:
        """The scope's root, made if it is not there. `PrefixTree.leave` it in the end."""
        root = self._by_scope.pop(scope, None) or Root(scope)
        self._by_scope[scope] = root
        root.references += 1
        return root

    def enter_anonymous(self, scope: Scope, *, start: int = 0) -> Root:
        """A new root that nobody finds, for blocks from position `start` on. `PrefixTree.leave` it in the end."""
        root = Root(scope, start=start, anonymous=True)
        self._anonymous.add(root)
        root.references += 1
        return root

    def join(self, root: Root) -> Root:
        """Enters a root that somebody is in, whether it can be found or not. `PrefixTree.leave` it in the end."""
        root.references += 1
        return root

    def forget(self, root: Root) -> None:
        """Nobody finds this root from now on. Who is in it stays."""
        del self._by_scope[root.scope]
        root.anonymous = True
        self._anonymous.add(root)

    def drop_if_empty(self, root: Root) -> None:
        """Lets a root go below which nothing is, and to which nobody publishes."""
        if root.children or root.references:
            return
        if root.anonymous:
            self._anonymous.discard(root)
        else:
            self._by_scope.pop(root.scope, None)
