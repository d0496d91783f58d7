// unroll: of a loop over an array that belongs in registers; an index that is not known sends the array to memory
#define UNROLL _Pragma("clang loop unroll(full)")
