"""mkdocs calls it: pages of other folders become pages of the site, and links follow.

The same files are read in the repository, so their links are those of the repository: one to a page
of the site becomes a link within it, one to another file that file's name.
"""

import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

_ROOT = Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"
# File of the repository -> page of the site.
PAGES = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/k8s/README.md": "kubernetes.md",
    "deploy/k8s/examples/README.md": "kubernetes-examples.md",
    "deploy/helm/README.md": "helm.md",
    "deploy/compose/README.md": "compose.md",
    "benchmarks/LOG.md": "log.md",
    "benchmarks/HISTORY.md": "history.md",
    "demo/README.md": "demonstration.md",
    "examples/README.md": "examples.md",
    "README.md": "index.md",
}
# Pages for developers and records that the search leaves out, and how much more than other pages a
# page counts in it. A page that answers a question comes before one that mentions the words.
NOT_SEARCHED = re.compile(r"(adr/.*|upstream/.*|log|history|changelog|before-0\.2|files)\.md")
SEARCH_BOOST = {
    "install.md": 4.0,
    "serve.md": 2.0,
    "images.md": 3.0,
    "structured-output.md": 2.0,
    "tools.md": 2.0,
    "sizing.md": 2.0,
    "troubleshooting.md": 4.0,
    "helm.md": 2.0,
    "architecture.md": 0.2,
    "internals.md": 0.2,
    "recipes.md": 0.2,
    "glossary.md": 0.2,
    "contributing.md": 0.2,
    "chaos.md": 0.2,
    "kubernetes.md": 0.5,
    "security.md": 0.5,
}
# Pages whose tables need the room of the table of contents.
WITHOUT_CONTENTS = {"index.md", "settings.md", "cards.md", "cli.md", "files.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")
_IMAGES = {".png", ".jpg", ".svg", ".webp"}


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - mkdocs'
    """Adds the pages of other folders, and the images that these pages show."""
    for source, page in PAGES.items():
        if page == "index.md":
            continue
        files.append(File.generated(config, page, abs_src_path=str(_ROOT / source)))
        for mark, _, target in _LINK.findall((_ROOT / source).read_text(encoding="utf-8")):
            path = ((_ROOT / source).parent / target).resolve()
            if mark and path.suffix in _IMAGES and not path.is_relative_to(_DOCS):
                uri = _asset(path)
                if files.get_file_from_path(uri) is None:
                    files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - mkdocs'
    """Rewrites the links of a page, and says how the search treats it."""
    uri: str = page.file.src_uri
    if uri in WITHOUT_CONTENTS:
        page.meta["hide"] = ["toc"]
    page.meta["search"] = {
        "exclude": NOT_SEARCHED.fullmatch(uri) is not None,
        "boost": SEARCH_BOOST.get(uri, 1.0),
    }
    own = {page: source for source, page in PAGES.items() if page != "index.md"}
    source = _ROOT / own[uri] if uri in own else _DOCS / uri
    return rewritten(markdown, source, uri)


def rewritten(markdown: str, source: Path, uri: str) -> str:
    """A page whose links are those of the site.

    Args:
        markdown: of the page.
        source: its file.
        uri: its place in the site.
    """

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        parts = urlsplit(target)
        if parts.scheme or not parts.path:
            return found[0]
        place = _place((source.parent / parts.path).resolve())
        if place is None:
            return text
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        return f"{mark}[{text}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{anchor})"

    fences = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in fences)


def _place(path: Path) -> str | None:
    """Where a file of the repository is in the site; None: nowhere.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    name = path.relative_to(_ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if path == _DOCS / "adr":
        return "adr/index.md"
    if path.is_relative_to(_DOCS) and path.is_file():
        return path.relative_to(_DOCS).as_posix()
    return _asset(path) if path.suffix in _IMAGES else None


def _asset(path: Path) -> str:
    return f"assets/{path.relative_to(_ROOT).as_posix()}"
