"""GPU kernels checked and run on a CPU.

A Metal kernel, through its own launcher:

    metal = pytest.importorskip("simt.metal", exc_type=ImportError)  # needs g++, x86-64 and libclang
    with metal.on_metal():
        ours = wht(x, before, after)  # mlx_backend/hadamard.py, as a Mac would run it
    assert mx.array_equal(ours, expected)

or a text alone: `metal.metal_kernel(name, inputs, outputs, source)(inputs=[...], grid=..., ...)`, the same keywords as
mx.fast.metal_kernel has.

Every call takes the text that MLX generates for these very arrays, has it checked (check.py: clang's C++ for OpenCL in
the place of Metal's front end; CheckError) and runs it (engine.cpp: fibers; KernelError) in three orders of threads and
groups, whose bits must agree. Faults it names, with lines of the text: races, divergence, deadlocks, accesses out of
bounds or misaligned, reads of what nobody wrote, outputs left unwritten, too many threads, buffers or bytes of
threadgroup memory, endless loops.

Test each kernel with an input of fewer than 8 elements (MLX passes those as `constant`), a ragged and the real shape.
House rules: `threadgroup` variables in the kernel's outermost scope; no `if constexpr` whose dead branch would not
compile; no structs read from buffers; no lambdas; a lane that has not returned takes part in every collective of its
SIMD group, and no lane of a SIMD group returns before another. What kernels use of Metal is declared twice, for the run
in metal.h and for the check in metal_check.h: add what is missing to both, or to what they share, metal_traits.h.

What this cannot show: speed; whether registers or a pipeline's limits allow a group's size; bugs of Apple's compiler;
the last bits of exp, log and their like, or of simd_sum in another order than the tree of today's GPUs; denormals
flushed to zero; memory that is weaker than barriers; whether Metal takes what clang takes, and the reverse.
The CUDA kernels run by the same engine, through tests/cuda_on_cpu.
"""
