// unroll: unrolls a loop over an array in registers; with an index unknown at compile time the array would be in memory
#define UNROLL _Pragma("clang loop unroll(full)")
