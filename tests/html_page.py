"""Reads pages that the package writes: elements with their attributes, text and ancestors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

# Elements of HTML, and of SVG as the templates write it, that have no end.
VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text with that of what is in it, blanks as one."""
        return " ".join(" ".join(self._all_texts()).split())

    def _all_texts(self) -> Iterator[str]:
        yield from self.texts
        for child in self.children:
            yield from child._all_texts()

    def all(self, tag: str = "", css_class: str = "") -> list[Element]:
        """What is in it, at any depth, of a tag or class."""
        found = []
        for child in self.children:
            classes = (child.attributes.get("class") or "").split()
            if tag in ("", child.tag) and (not css_class or css_class in classes):
                found.append(child)
            found += child.all(tag, css_class)
        return found

    def with_id(self, name: str) -> Element:
        (found,) = [each for each in self.all() if each.attributes.get("id") == name]
        return found


class Page(HTMLParser):
    """The root element of a page; every element must be closed where it should."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = self.current = Element("", {})
        self.feed(html)
        self.close()
        assert self.current is self.root, f"<{self.current.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), self.current)
        assert len(element.attributes) == len(attrs), f"<{tag}> has an attribute twice"
        self.current.children.append(element)
        if tag not in VOID:
            self.current = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.current.children.append(Element(tag, dict(attrs), self.current))

    def handle_endtag(self, tag: str) -> None:
        assert self.current.tag == tag, f"</{tag}> closes <{self.current.tag}>"
        assert self.current.parent is not None
        self.current = self.current.parent

    def handle_data(self, data: str) -> None:
        self.current.texts.append(data)


def read(html: str) -> Element:
    """The page as a tree."""
    return Page(html).root
