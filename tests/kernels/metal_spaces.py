"""Finds what is wrong with address spaces in Metal source, as far as another language shows it.

C++ for OpenCL has the same four, under other names, and libclang knows it: a pointer to one is not
a pointer to another. Metal wants each pointer, reference and constant to name its space.
"""

from pathlib import Path

import pytest

cindex = pytest.importorskip("clang.cindex")
NAMES = Path(__file__).with_name("metal") / "address_spaces"
OPTIONS = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-nostdinc", "-cl-no-stdinc", "--target=spir64"),
    *("-Wno-unknown-attributes", f"-I{NAMES}"),
]
SPACES = ("global", "local", "constant", "private")  # device, threadgroup, constant, thread
DECLARED = {
    cindex.CursorKind.PARM_DECL,
    cindex.CursorKind.FIELD_DECL,
    cindex.CursorKind.VAR_DECL,
}
SCOPES = {
    cindex.CursorKind.TRANSLATION_UNIT,
    cindex.CursorKind.NAMESPACE,
    cindex.CursorKind.STRUCT_DECL,
    cindex.CursorKind.CLASS_TEMPLATE,
}


def faults(text):
    """What clang says of the text of a kernel, and declarations that name no address space."""
    program = text.replace("[[kernel]]", "__kernel")
    unit = cindex.Index.create().parse("k.clcpp", OPTIONS, [("k.clcpp", program)])
    said = [str(diagnostic) for diagnostic in unit.diagnostics]
    return said + [
        f"{cursor.type.spelling} {cursor.spelling} has no address space"
        for cursor in unit.cursor.walk_preorder()
        if cursor.kind in DECLARED and str(cursor.location.file) == "k.clcpp" and is_unnamed(cursor)
    ]


def is_unnamed(cursor):
    spelled = cursor.type.spelling
    if cursor.type.get_pointee().kind != cindex.TypeKind.INVALID:
        return not any(f"__{space} " in spelled for space in SPACES)
    is_global = cursor.kind == cindex.CursorKind.VAR_DECL and cursor.semantic_parent.kind in SCOPES
    return is_global and "__constant" not in spelled
