"""GBNF, llama.cpp's language of grammars, as the Lark dialect of llguidance."""

import re

from common.errors import UsageError

MOST_CHARACTERS = 1 << 16
MOST_DEPTH = 50  # of groups inside each other
IS_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))")
# A comment, a literal, a class of characters, or the name `start`. What is not closed is found too,
# so that the search takes linear time.
TOKEN = re.compile(
    r'#[^\r\n]*|"((?:\\.|[^"\\])*)("?)|\[(\^?)((?:\\.|[^\]\\])*)(\]?)|(?<![\w-])start(?![\w-])', re.DOTALL
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
NAMED = {"n": "\n", "r": "\r", "t": "\t"}
SHOWN = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def lark_of(text: str) -> str:
    """Return a grammar in llguidance's Lark dialect, from GBNF with the rule `root`, or from that dialect itself.

    Raises UsageError for text that is neither, and without llguidance.
    """
    if IS_LARK.search(text):
        return text
    try:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
    except ModuleNotFoundError:
        raise UsageError("llguidance is not installed; grammars need it: pip install 'bimetal[grammar]'") from None
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"the grammar has {len(text)} characters; at most {MOST_CHARACTERS} are read")
    plain = TOKEN.sub(_token, text)
    if _depth(plain) > MOST_DEPTH:
        raise UsageError(f"the grammar has groups inside each other to more than {MOST_DEPTH} levels")
    try:
        return str(gbnf_to_lark(plain))
    except GbnfToLarkError as error:
        raise UsageError(f"the grammar is neither GBNF nor Lark: {' '.join(str(error).split())[:200]}") from None
    except Exception as error:  # of rules that are missing, or named twice
        raise UsageError(f"the grammar is refused: {' '.join(str(error).split())[:200]}") from None


def _token(found: re.Match[str]) -> str:
    """Rewrite a literal or a class without the escapes that the converter misreads; drop a comment, rename a rule."""
    if found[0] == "start":  # the converter's name for `root`
        return "own-start"
    literal, quote, negated, members, bracket = found.groups()
    if "" in (quote, bracket):
        raise UsageError(f"the grammar has {found[0]!r:.40}, which is not closed")
    if literal is not None:
        return f'"{_characters(literal, special="")}"'
    return "" if members is None else f"[{negated}{_characters(members, special='-^[]')}]"


def _characters(text: str, special: str) -> str:
    """Write characters as they are, and escape quotes, backslashes, ends of lines and escaped `special` ones."""

    def written(found: re.Match[str]) -> str:
        *codes, named, plain = found.groups()
        if plain is not None and plain in special:
            return plain  # the sign of a range
        character = plain or NAMED.get(named or "", named or "")
        if code := next(filter(None, codes), None):
            character = chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else "\ufffd"
        if character in SHOWN:
            return SHOWN[character]
        if character < " " or character == "\x7f" or character in special:
            return f"\\x{ord(character):02x}"
        return f"\\{character}" if character in '"\\' else character

    return ESCAPE.sub(written, text)


def _depth(text: str) -> int:
    """Count the most groups of GBNF inside each other."""
    depth = most = 0
    for character in TOKEN.sub("", text):
        depth += (character == "(") - (character == ")")
        most = max(most, depth)
    return most
