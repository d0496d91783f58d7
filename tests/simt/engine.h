// What a kernel that runs on the CPU sees of the engine (engine.cpp): where its thread stands, and how it waits for
// others.
#pragma once

namespace simt {

struct Index {
    unsigned x, y, z;
};

struct Thread {
    Index position;              // in its group
    unsigned index, simd, lane;  // of the group, x fastest; index / 32; index % 32
};

extern Thread* self;                          // the thread that runs
extern Index threads, groups;                 // of the grid; a group at the end of an axis may be partial
extern Index group, group_size, whole_group;  // the group that runs: its position, its size, and the size asked for

enum Order { ORDERS_NOTHING = 0, ORDERS_GROUP_MEMORY = 1, ORDERS_DEVICE_MEMORY = 2, ORDERS_ALL = 3 };

// A barrier of the group. `line` names the place: threads that wait at different places have diverged (0: any place).
void barrier(const char* what, int line, Order order);

// Every lane of the SIMD group brings `mine`; the last to arrive has `compute(lanes, how)` write everyone's result.
// lanes[i] is null where a partial group has no lane i.
typedef void Compute(void** lanes, void* how);
void meet(const char* what, int line, void* mine, Compute* compute, void* how, Order order = ORDERS_NOTHING);

template <class F>
void together(const char* what, int line, void* mine, F compute) {
    meet(what, line, mine, [](void** lanes, void* how) { (*(F*)how)(lanes); }, &compute);
}

void yield();  // lets others run: for loops that spin
// An access by the shim itself; an atomic one may coincide with other atomic ones.
void note(const void* p, unsigned bytes, bool reads, bool writes, bool atomic, const void* pc);
[[noreturn]] void fail(const char* format, ...);  // ends the launch with an error

// A grid of `threads` in groups of `group`.
enum Schedule : unsigned { FORWARD, REVERSE, RANDOM };  // the order of threads and groups; beyond: other random ones
struct Launch {
    void (*kernel)();
    Index threads, group;
    unsigned schedule;
    unsigned returned_may_skip_barriers;  // CUDA's rule; in Metal all come or none
    char* group_memory;                   // filled with ones before each group
    unsigned long group_memory_bytes;
    double seconds;  // of CPU, at most
};
struct Buffer;

}  // namespace simt

// Runs a grid. Buffers are copied between inaccessible memory, and pointers[i] set to where the kernel finds buffer i.
// Returns an error, in which @<hex> is an address in the kernel's library, or null.
extern "C" const char* simt_run(const simt::Launch* launch, simt::Buffer* buffers, unsigned buffer_count,
                                void** pointers);
