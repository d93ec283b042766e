"""The site's hooks: navigation is completed, links out of docs/ lead to pages of their files."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
SCRIPT = Path(__file__).parents[2] / "scripts" / "dev" / "site_hooks.py"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_names_every_page_once(hooks, tmp_path):
    for name in ("index.md", "methods/a.md", "methods/b.md", "loose.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    nav = ["index.md", {"Methods": ["methods/b.md", "methods/*"]}, {"Guides": []}]
    config = hooks.on_config({"docs_dir": str(tmp_path), "nav": nav})
    methods = ["methods/b.md", "methods/a.md"]
    assert config["nav"] == ["index.md", {"Methods": methods}, {"Guides": ["loose.md"]}]


@pytest.mark.parametrize(
    "page, target, file",
    [
        ("start.md", "../README.md", "README.md"),
        ("methods/README.md", "../../pyproject.toml", "pyproject.toml"),
        ("start.md", "../docs/api.md", ""),  # inside
        ("start.md", "../../elsewhere.md", ""),
        ("start.md", "../no/such/file.py", ""),
    ],
)
def test_files_outside_docs_are_told(hooks, page, target, file):
    assert hooks.outside(page, target) == file


def test_links_lead_to_the_pages_of_files(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="methods/a.md"))
    text = "[setup](../../pyproject.toml#L3), [api](../api.md), [gone](../../gone.py)"
    led = hooks.on_page_markdown(text, page, None, None)
    assert led == ("[setup](../source/pyproject.toml.md), [api](../api.md), [gone](../../gone.py)")


def test_a_page_is_made_of_every_file_that_is_linked(hooks, tmp_path):
    from mkdocs.config.base import load_config
    from mkdocs.structure.files import File, Files

    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: s\n")
    config = load_config(str(tmp_path / "mkdocs.yml"), docs_dir=str(docs))
    config.plugins._current_plugin = "hooks"  # as mkdocs sets it around a hook
    page = File.generated(config, "a.md", content="[it](../scripts/dev/site_hooks.py)")
    files = hooks.on_files(Files([page]), config)
    (made,) = [f for f in files if f.src_uri == "source/scripts/dev/site_hooks.py.md"]
    assert "````python\n" in made.content_string and "def on_files" in made.content_string
