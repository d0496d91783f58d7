"""The rules of the Metal Shading Language, as far as clang's C++ for OpenCL front end shares them, over MLX's text."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from clang.cindex import Cursor, CursorKind, Diagnostic, Index, TranslationUnit, TypeKind

from simt.text import flat, without_comments

HERE = Path(__file__).parent
REFUSED_EXTENSIONS = (  # without the generic address space an unqualified pointer is `thread`, as in Metal
    "-__opencl_c_generic_address_space,-__opencl_c_program_scope_global_variables,-cl_khr_fp64,-__opencl_c_fp64,"
    "-__cl_clang_function_pointers,-__cl_clang_variadic_functions,-__opencl_c_pipes,-__opencl_c_device_enqueue"
)
ERRORS = "return-type uninitialized sometimes-uninitialized conditional-uninitialized array-bounds shift-count-overflow"
FLAGS = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "--target=x86_64-unknown-linux-gnu", f"-I{HERE}"]
FLAGS += ["-Xclang", f"-cl-ext={REFUSED_EXTENSIONS}", "-cl-single-precision-constant", "-ferror-limit=0"]
FLAGS += ["-Wno-everything", "-Wimplicit-float-conversion", *(f"-Werror={warning}" for warning in ERRORS.split())]
VECTOR_CALL = re.compile(r"\b((?:half|bfloat|float|u?int|u?short|u?char|u?long)[234]|vec<\w+, *\w+>)\s*\(")
REFUSED_WORDS = re.compile(r"\b(virtual|dynamic_cast|typeid|thread_local|asm|std|printf|assert|goto|try|throw|catch)\b")
SPACE = re.compile(r"\b(device|constant|threadgroup|thread|auto)\b")
FILE = "kernel.metal"


class CheckError(AssertionError):
    """What Metal would refuse in a kernel's text."""


@functools.cache
def check(text: str) -> None:
    """Raise CheckError with every complaint about a text of MLX, each with its line."""
    found = sorted(set(_complaints(text)))
    if found:
        lines = text.splitlines()
        raise CheckError("\n".join(f"line {n}: {what}\n  {n}: {lines[n - 1].strip()}" for n, what in found))


def _complaints(text: str) -> Iterator[tuple[int, str]]:
    for n, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            yield n, "the text reaches Metal as ASCII"
    for n, line in enumerate(without_comments(text).splitlines(), 1):
        for word in REFUSED_WORDS.findall(line):
            yield n, f"Metal has no {word}"
    code = VECTOR_CALL.sub(r"vector_of<\1>(", flat(text, _opening))
    code = f'#include "metal_check.h"\n{code}'
    unit = _clang().parse(FILE, args=FLAGS, unsaved_files=[(FILE, code)])
    for complaint in unit.diagnostics:
        to_bfloat = re.search(r"to '[^']*(bfloat|__bf16)", complaint.spelling)
        if complaint.severity >= Diagnostic.Error or to_bfloat:
            here = complaint.location.file and complaint.location.file.name == FILE
            yield (complaint.location.line - 1 if here else 1), complaint.spelling
    yield from _lints(unit, code)


def _opening(name: str, args: str) -> str:
    return f"__kernel void {name}(\n" + re.sub(r" \[\[[^\]]*\]\]", "", args) + ")"


@functools.cache
def _clang() -> Index:
    return Index.create()


def _lints(unit: TranslationUnit, code: str) -> Iterator[tuple[int, str]]:
    """What clang accepts and Metal refuses."""
    calls: dict[str, set[str]] = {}

    def walk(cursor: Cursor, function: str) -> Iterator[tuple[int, str]]:
        kind, line = cursor.kind, cursor.location.line - 1
        if kind in (CursorKind.FUNCTION_DECL, CursorKind.FUNCTION_TEMPLATE, CursorKind.CXX_METHOD):
            function = cursor.get_usr()
        elif kind == CursorKind.CALL_EXPR and cursor.referenced:
            calls.setdefault(function, set()).add(cursor.referenced.get_usr())
        elif kind == CursorKind.LAMBDA_EXPR:
            yield line, "a lambda, which Metal 3.1 does not have"
        elif kind in (CursorKind.VAR_DECL, CursorKind.PARM_DECL) and cursor.type.kind in (
            TypeKind.POINTER,
            TypeKind.LVALUEREFERENCE,
        ):
            start, end = cursor.extent.start.offset, cursor.extent.end.offset
            declared = (
                re.split(r"[;{}(),]", code[:start])[-1] + code[start:end]
            )  # an address space is a macro: before it
            if not SPACE.search(declared):
                yield line, f"{cursor.spelling} is a pointer or reference without an address space"
        for child in cursor.get_children():
            yield from walk(child, function)

    for cursor in unit.cursor.get_children():
        if cursor.location.file and cursor.location.file.name == FILE:
            yield from walk(cursor, "")
    for function in calls:
        reached: set[str] = set()
        ahead = [function]
        while ahead:
            for called in calls.get(ahead.pop(), set()) - reached:
                reached.add(called)
                ahead.append(called)
        if function in reached:
            yield 1, "a function that calls itself"
