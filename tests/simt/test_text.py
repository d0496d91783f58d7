"""The text that MLX generates for a kernel: a change in MLX shows up in these tests."""

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
from mlx_backend import kernels  # noqa: E402
from simt import text  # noqa: E402

BODY = """
    uint i = thread_position_in_grid.x; // x_shape x_strides x_ndim
    out[i] = T(x[i] + y[0] * s * N);
"""


def launch(**call) -> text.Launch:
    kernel = mx.fast.metal_kernel(
        name="k", input_names=["x", "y", "s"], output_names=["out"], source=BODY, header="// helpers\n"
    )
    inputs = [mx.zeros((4, 5)), mx.zeros(3, mx.bfloat16), mx.array(1.0)]
    sizes = {"output_shapes": [(20,)], "output_dtypes": [mx.float16], "grid": (20, 1, 1), "threadgroup": (7, 1, 1)}
    return text.recorded(kernel, inputs, **sizes, **call)


def test_the_recorded_launch():
    ours = launch(template=[("T", mx.float16), ("N", 3), ("B", True)])
    assert (ours.grid, ours.threadgroup, ours.contiguous) == ((20, 1, 1), (7, 1, 1), True)
    name = "custom_kernel_k__float16_t_3_1_float_bfloat16_tc_floats_float16_t"
    assert (
        ours.text
        == f"""// helpers
template <typename T, int N, bool B>
[[kernel]] void {name}(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int64_t* x_strides [[buffer(2)]],
  const constant int& x_ndim [[buffer(3)]],
  const constant bfloat16_t* y [[buffer(4)]],
  const constant float& s [[buffer(5)]],
  device float16_t* out [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {{
{BODY}
}}

template [[host_name("{name}")]] [[kernel]] decltype({name}<float16_t, 3, 1>) {name}<float16_t, 3, 1>;
"""
    )
    assert [a.name for a in text.arguments(ours.text) if a.mark] == [
        "x",
        "x_shape",
        "x_strides",
        "x_ndim",
        "y",
        "s",
        "out",
    ]


def test_flat_text_keeps_its_lines():
    ours = launch(template=[("T", mx.float16), ("N", 3), ("B", True)])
    flat = text.flat(ours.text, lambda name, args: f"void {name}(\n{args})").splitlines()
    assert flat[0].strip() == ""
    assert flat[10] == (
        "  uint3 thread_position_in_grid [[thread_position_in_grid]]) "
        "{ typedef float16_t T; constexpr int N = 3; constexpr bool B = 1; "
    )
    assert flat[13] == "    out[i] = T(x[i] + y[0] * s * N);"
    assert flat[13] in ours.text.splitlines()[13]
    assert "host_name" not in "\n".join(flat)


def test_a_kernels_file(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "a.h").write_text('// a\n#include "b.h"\nint a; // x_shape\n')
    (tmp_path / "include" / "b.h").write_text("int b;\n")
    (tmp_path / "k.metal").write_text(
        '// k: of x_shape\n#include "a.h"\n#include "b.h"\nint c;\n[[kernel]] void k() {\n    out[0] = 1;\n}\n'
    )
    header, body = kernels.source("k")
    assert header.split() == ["int", "b;", "int", "a;", "int", "c;"]
    assert body == "    out[0] = 1;\n"
    assert "x_shape" not in header


@pytest.mark.parametrize("path", sorted(kernels.FOLDER.glob("*.metal")), ids=lambda path: path.stem)
def test_every_kernels_file_has_its_header(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith(f"// {path.stem}: ")
    said = {line[3:].split(" ")[0] for line in lines if line.startswith("// ")}
    assert {"Meaning", "In", "Build", "Work", "Assumes", "Numbers", "Bound", "Tried"} <= said
    assert f"[[kernel]] void {path.stem}() {{" in lines
