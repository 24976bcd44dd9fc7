"""README, documentation, help texts and messages: plain words, short paragraphs, no dead links."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from docstring_parser import parse

import lit_pfl.cli.federated_cli  # and so all classes that an option can name
import lit_pfl.methods
from lit_pfl import Client, Federation
from lit_pfl.cli.messages import CLASSES
from lit_pfl.cli.overview import OVERVIEW, families
from lit_pfl.cli.tools import TOOLS, run_tool

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "configs/paper/README.md",
    ROOT / "examples/reproduce/README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("api/*.md")),
    *sorted(DOCS.glob("reproduction/*.md")),
]
LONGEST_PARAGRAPH = 80  # words
LONGEST_README = 165  # lines
FENCE = re.compile(r"^(`{3,}|:{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def private_words() -> dict[str, str]:
    lines = (DOCS / "private_words.txt").read_text().splitlines()
    return dict(line.split("\t") for line in lines if not line.startswith("#"))


def without_code(text: str) -> str:
    """Drop code, quoted output, quoted words and the addresses of links."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    return re.sub(r"``.*?``|`[^`]*`|\]\([^)]*\)", "", text)


def found(text: str) -> list[str]:
    """Return the private words of a text, each with its surroundings and with what to write instead."""
    text = " ".join(without_code(text).split())
    return [
        f"...{text[max(0, hit.start() - 30) : hit.end() + 20]}...: {instead}"
        for word, instead in private_words().items()
        for hit in re.finditer(rf"(?<![\w-])(?:{word})(?![\w-])", text, re.IGNORECASE)
    ]


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of running text: no code, no tables, no headings; an item of a list is one of its own."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_code(text))
    return [block for block in blocks if not block.lstrip().startswith(("|", "#"))]


def described() -> dict[str, str]:
    """Return what the help takes from docstrings, by class; of a method all of it, which its page shows."""
    classes, seen = [Federation, *CLASSES.values()], set()
    while classes:
        cls = classes.pop()
        classes += [sub for sub in cls.__subclasses__() if sub not in seen]
        seen.add(cls)
    return {
        f"{cls.__module__}.{cls.__name__}": " ".join(
            [doc.short_description or "", *(param.description or "" for param in doc.params)]
        )
        + (cls.__doc__ if issubclass(cls, Client) else "")
        for cls in seen
        if re.match(r"lit_pfl(?!\.testing)", cls.__module__) and cls.__doc__ and (doc := parse(cls.__doc__))
    }


def literals(source: str) -> list[str]:
    """Return the strings of a program that have several words: its messages, but not its docstrings.

    A string with values in it (an f-string) is one text; the names of options in it are code.
    """
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [
        "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in nodes
        if isinstance(node, ast.JoinedStr | ast.Constant) and node not in docstrings
    ]
    return [re.sub(r"\b\w+(?:\.\w+)+", "", text) for text in texts if isinstance(text, str) and " " in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestPage:
    def test_has_no_private_word(self, page):
        assert not found(page.read_text())

    def test_has_no_long_paragraph(self, page):
        lengths = {text.strip()[:60]: len(text.split()) for text in paragraphs(page.read_text())}
        assert not {text: words for text, words in lengths.items() if words > LONGEST_PARAGRAPH}

    def test_has_no_dead_link(self, page):
        generated = {DOCS / "methods/index.md", *(DOCS / f"methods/{name}.md" for name in lit_pfl.methods.__all__)}
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text()))
        there = [(page.parent / link).resolve() for link in links if "://" not in link]
        assert not [str(path) for path in there if not path.exists() and path not in generated]


def test_help_has_no_private_word():
    words = {name: found(text) for name, text in described().items()}
    assert not {name: hits for name, hits in words.items() if hits}


@pytest.mark.seconds
def test_messages_have_no_private_word():
    files = [file for part in ("lit_pfl", "callbacks") for file in sorted((ROOT / part).rglob("*.py"))]
    hits = {str(file.relative_to(ROOT)): found(" | ".join(literals(file.read_text()))) for file in files}
    assert files
    assert not {file: words for file, words in hits.items() if words}


def test_overviews_have_no_private_word():
    lines = [f"{family}: {name}: {about}" for family, members in families().items() for name, about in members.items()]
    lines += [text for _, text in TOOLS.values()]
    lines += [path.read_text().partition("\n")[0] for path in (ROOT / "configs").rglob("*.yaml")]
    assert not found("\n".join([OVERVIEW, *lines]))


@pytest.mark.parametrize("name", TOOLS)
def test_help_of_a_command_has_no_private_word(name, capsys):
    with pytest.raises(SystemExit):
        run_tool(name, ["--help"])
    assert not found(capsys.readouterr().out)


def test_readme_is_short_and_names_every_method():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= LONGEST_README
    assert not [name for name in lit_pfl.methods.__all__ if not re.search(rf"\b{name}\b", readme)]


def test_every_method_has_a_row_in_the_guide_to_choose_one():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "choose_a_method.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(lit_pfl.methods.__all__)


def test_every_method_has_a_formula():
    assert sorted(re.findall(r"^## (\w+)$", (DOCS / "formulas.md").read_text(), re.MULTILINE)) == sorted(
        ["Symbols", *lit_pfl.methods.__all__]
    )


def test_the_index_of_reproductions_has_the_numbers_of_its_pages():
    index = (DOCS / "reproduction/index.md").read_text()
    for page in [*DOCS.glob("reproduction/*_table*.md"), *DOCS.glob("reproduction/simfed_states_[mr]*.md")]:
        assert f"]({page.name})" in index
        for column, summary in re.findall(r"^- (.*?): (\d+ orderings \(.*\))$", page.read_text(), re.MULTILINE):
            assert summary in index or ", of " in column, (page.name, column)  # rows of our own are not the paper's
    rows = [line for line in index.splitlines() if line.startswith("| [") and not re.search("reduced|PFLlib", line)]
    verdicts: Counter[str] = Counter()
    for name, count in re.findall(r"(holds|open|neither|level|reversed)\b[a-z ]*: (\d+)", "\n".join(rows)):
        verdicts[name] += int(count)
    against = verdicts.total() - verdicts["holds"] - verdicts["open"]
    assert f"{verdicts['holds']} of the papers' {verdicts.total()} orderings of two rows hold" in index
    assert f"{verdicts['open']} are open, and {against} are reversed or level" in index
