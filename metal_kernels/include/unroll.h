// unroll: unrolls a loop over an array in registers; an index unknown at compile time would move it to memory
#define UNROLL _Pragma("clang loop unroll(full)")
