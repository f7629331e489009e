"""One self-contained HTML file with the lens page and the results for one text, which opens without a server."""

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from regard.errors import DataError
from regard.files import replace_text
from regard.lens.request import LensRequest
from regard.lens.session import Lens
from regard.runs.trained_model import TrainedModel

PAGE = Path(__file__).parent / "page"
FIRST = "main"  # the module that starts the page
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def save(models: Mapping[str, TrainedModel], text: str, path: str | Path) -> None:
    """Write the page for one text to a file, with the results of one or two models side by side."""
    lenses = [Lens(run, name) for name, run in models.items()]
    results = [lens.inspect(LensRequest(text)) for lens in lenses]
    view = urlencode({"q": text} | {("m2" if i else "m"): name for i, name in enumerate(models)})
    data = {"models": [lens.describe() for lens in lenses], "results": results, "view": view}
    try:
        replace_text(Path(path), html(data))
    except OSError as error:
        raise DataError(f"--export {path}: cannot be written ({error.strerror}); name another file") from None


def html(data: Mapping[str, Any]) -> str:
    """Return the page with its style, its scripts and `data` inside."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = (PAGE / "lens.css").read_text(encoding="utf-8")
    d3 = (PAGE / "vendor" / "d3.js").read_text(encoding="utf-8")
    parts = {
        '<meta charset="utf-8" />': '<meta charset="utf-8" />\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<link rel="stylesheet" href="lens/page/lens.css" />': f"<style>\n{style}</style>",
        '<script src="lens/page/vendor/d3.js"></script>': f"<script>\n{d3}</script>",
        '<script type="module" src="lens/page/main.js"></script>': f'<script id="saved" type="application/json">'
        f"{safe_json(data)}</script>\n<script>\n{bundle()}</script>",
    }
    for old, new in parts.items():
        assert page.count(old) == 1
        page = page.replace(old, new)
    return page


def safe_json(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: `<` is escaped, so that no text can close the element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def bundle() -> str:
    """Return all modules of the page as one script, because browsers do not load modules from `file:` addresses."""
    done: dict[str, str] = {}
    _add(FIRST, done)
    return '"use strict";\n' + "".join(done.values())


def _add(name: str, done: dict[str, str]) -> None:
    """Add a module to `done`, after the modules that it imports.

    The module is wrapped in a function, so that its variables do not clash with those of other modules.
    """
    source = (PAGE / f"{name}.js").read_text(encoding="utf-8")
    for _, other in IMPORT.findall(source):
        if other not in done:
            _add(other, done)
    exports = ", ".join(EXPORT.findall(source))
    body = EXPORT.sub("", IMPORT.sub(lambda found: f"const {{{found[1]}}} = modules_{found[2]};\n", source))
    done[name] = f"const modules_{name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"
