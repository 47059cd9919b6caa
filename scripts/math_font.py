"""Makes services/gateway/static/math.woff2, the font of formulas on the page: `make math-font`.

The font is a subset of Latin Modern Math, which the Debian package fonts-lmodern contains. It has
the characters that Temml can write, the mathematical alphabets, and the larger variants of
brackets, roots and operators that the MATH table names. Without such a font a browser draws no root
sign, and brackets do not grow.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

_STATIC = Path(__file__).resolve().parents[1] / "services" / "gateway" / "static"
TEMML = _STATIC / "temml.min.js"
OUT = _STATIC / "math.woff2"
PACKAGE = "fonts-lmodern"
FONT = "usr/share/texmf/fonts/opentype/public/lm-math/latinmodern-math.otf"
# The licence asks that a changed font has another name.
FAMILY = "Triptych Math"
_NOTE = "Subset of Latin Modern Math 1.959, made for the chat page of Triptych."
# Characters that no escape in Temml's source names: first and last code points.
_RANGES = (
    (0x20, 0x7E),  # keyboard
    (0x391, 0x3C9),  # Greek
    (0x2200, 0x22FF),  # operators, among them the root sign, which the browser itself writes
    (0x1D400, 0x1D49B),  # bold, italic and bold italic
    (0x1D49C, 0x1D4CF),  # script
    (0x1D504, 0x1D537),  # Fraktur
    (0x1D538, 0x1D56B),  # double-struck
    (0x1D5A0, 0x1D5D3),  # sans-serif
    (0x1D670, 0x1D6A3),  # monospace
    (0x1D6A4, 0x1D755),  # dotless, and Greek in bold, italic and bold italic
    (0x1D7CE, 0x1D7FF),  # digits
)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\u\{([0-9a-fA-F]+)\}|0x([0-9a-fA-F]{3,5})\b")
# Names of a font: family, unique identifier, full name, PostScript name, description.
_FAMILY_NAMES, _UNIQUE, _FULL, _POSTSCRIPT, _DESCRIPTION = (1, 16), 3, 4, 6, 10
_WINDOWS = (3, 1, 0x409)


def code_points(script: str) -> set[int]:
    """Returns the code points of `_RANGES` and those of the characters in Temml's source."""
    found = {ord(character) for character in script}
    found |= {int(next(filter(None, match.groups())), 16) for match in _ESCAPE.finditer(script)}
    for first, last in _RANGES:
        found |= set(range(first, last + 1))
    return found


def make(source: Path, target: Path, wanted: set[int]) -> None:
    """Writes the subset of a font that has `wanted`, as WOFF2, under another name."""
    options = subset.Options(flavor="woff2")
    options.layout_features = ["dtls"]  # i and j without a dot, below accents
    options.desubroutinize = True  # is larger before and smaller after compression
    options.hinting = False
    options.recalc_timestamp = False
    options.drop_tables += ["FFTM"]  # the times of FontForge
    font = subset.load_font(str(source), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=wanted)
    subsetter.subset(font)
    _rename(font)
    subset.save_font(font, str(target), options)


def _rename(font: TTFont) -> None:
    names = font["name"]
    postscript = FAMILY.replace(" ", "")
    for name in (*_FAMILY_NAMES, _FULL):
        names.setName(FAMILY, name, *_WINDOWS)
    names.setName(postscript, _POSTSCRIPT, *_WINDOWS)
    names.setName(f"1.959;{postscript}", _UNIQUE, *_WINDOWS)
    names.setName(_NOTE, _DESCRIPTION, *_WINDOWS)
    names.removeNames(platformID=1)  # the same names for old Macintosh systems
    outlines = font["CFF "].cff
    outlines.fontNames[0] = postscript
    outlines[0].FullName = outlines[0].FamilyName = FAMILY


def main() -> int:
    """Downloads the package, makes the font, and prints its size."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)  # apt-get may download as another user
        subprocess.run(["apt-get", "download", "-qq", PACKAGE], cwd=folder, check=True)
        package = next(folder.glob("*.deb"))
        subprocess.run(["dpkg-deb", "--extract", str(package), "files"], cwd=folder, check=True)
        make(folder / "files" / FONT, OUT, code_points(TEMML.read_text(encoding="utf-8")))
    print(f"{OUT}: {OUT.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
