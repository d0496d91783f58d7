// A GPU's threads as fibers: one group at a time, a thread until it waits, in a chosen order.
//
// Errors that end a launch: threads of a group at different barriers, lanes of a SIMD group at different collectives,
// either after a sibling has returned, a wait that nobody ends, any fault or endless loop.
// Kernels compiled with -fsanitize=thread call the __tsan_ functions at every access to memory, and those with
// -fsanitize=undefined the __ubsan_ ones; both are defined here. They find accesses outside a buffer, two threads at
// one place of which one writes with no barrier between, and reads of what nobody has written.
#include "engine.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace simt {

Thread* self;
Index threads, groups, group, group_size, whole_group;

static void settle();  // the last write to memory

namespace {

constexpr int MOST_THREADS = 1024, LANES = 32;
constexpr size_t STACK = 64 << 10, GUARD = 256 << 10, PAGE = 4096;
constexpr size_t GAP = 64 << 10;  // inaccessible bytes around every buffer

enum State { RUNS, IN_COLLECTIVE, AT_BARRIER, RETURNED };
struct Fiber : Thread {
    void* stack_pointer;
    State state;
    const char* waits_in;
    int line;
};
struct Simd {
    const char* what;
    int line;
    unsigned arrived, present, returned;
    unsigned epoch[2];  // barriers of the SIMD group passed, by kind of memory
    void* mine[LANES];
};

void (*kernel)();
Schedule schedule;
uint32_t dice;
bool returned_may_skip_barriers;

Fiber fibers[MOST_THREADS], launcher;  // the launcher waits for all others
Simd simds[MOST_THREADS / LANES];
char* stacks;
int ready[2 * MOST_THREADS];  // a ring
unsigned first_ready, ready_count;

unsigned group_number, count, alive, at_barrier;  // of the group that runs: threads in all, not returned, waiting
const char* barrier_name;
int barrier_line;
unsigned epoch[2];  // barriers of the group passed, by kind of memory

char message[2048];
sigjmp_buf escape;

unsigned random_below(unsigned n) {
    dice ^= dice << 13, dice ^= dice >> 17, dice ^= dice << 5;
    return dice % n;
}

void make_ready(int thread) {
    fibers[thread].state = RUNS;
    ready[(first_ready + ready_count++) % (2 * MOST_THREADS)] = thread;
}

// Threads from..to-1 that `wait` become ready, in the schedule's order.
void release(unsigned from, unsigned to, State wait) {
    for (unsigned i = 0; i < to - from; i++) {
        const unsigned thread = schedule == REVERSE ? to - 1 - i : from + i;
        if (fibers[thread].state == wait) make_ready(thread);
    }
}

extern "C" void switch_stack(void** save, void* to);
asm(R"(
.text
switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

const char* place(int thread) {  // of a thread, for messages
    static char text[4][80];
    static int next;
    char* out = text[next++ % 4];
    const Index p = fibers[thread].position;
    snprintf(out, sizeof text[0], "thread (%u, %u, %u) of group (%u, %u, %u)", p.x, p.y, p.z, group.x, group.y,
             group.z);
    return out;
}

const Fiber* first(State state) {
    for (unsigned i = 0; i < count; i++)
        if (fibers[i].state == state) return &fibers[i];
    return nullptr;
}

[[noreturn]] void report_deadlock() {
    const Fiber *a = first(IN_COLLECTIVE), *b = first(AT_BARRIER);
    if (a && b)
        fail("divergence: %s waits in %s at line %d while %s waits in %s at line %d", place(a->index), a->waits_in,
             a->line, place(b->index), b->waits_in, b->line);
    if (!a) a = b;
    fail("deadlock: %s waits forever in %s at line %d", place(a->index), a->waits_in, a->line);
}

// Runs the next thread that can; the caller has noted what it waits for.
void switch_away() {
    settle();
    Fiber* from = (Fiber*)self;
    if (!ready_count) {
        if (alive) report_deadlock();
        switch_stack(&from->stack_pointer, launcher.stack_pointer);
    }
    if (schedule == RANDOM) {
        int& a = ready[first_ready];
        int& b = ready[(first_ready + random_below(ready_count)) % (2 * MOST_THREADS)];
        const int swap = a;
        a = b, b = swap;
    }
    Fiber* to = &fibers[ready[first_ready]];
    first_ready = (first_ready + 1) % (2 * MOST_THREADS), ready_count--;
    self = to;
    if (to != from) switch_stack(&from->stack_pointer, to->stack_pointer);
}

void pass_barrier(Order order) {
    for (int kind = 0; kind < 2; kind++) epoch[kind] += order >> kind & 1;
    at_barrier = 0;
    release(0, count, AT_BARRIER);
}

void run_thread() {
    kernel();
    Fiber* me = (Fiber*)self;
    Simd& simd = simds[me->simd];
    me->state = RETURNED, alive--;
    simd.returned |= 1u << me->lane;
    if (simd.arrived)
        fail("divergence: %s returns while lanes of its SIMD group wait in %s at line %d", place(me->index), simd.what,
             simd.line);
    if (at_barrier) {
        if (!returned_may_skip_barriers)
            fail("divergence: %s returns while others wait in %s at line %d", place(me->index), barrier_name,
                 barrier_line);
        if (at_barrier == alive) pass_barrier(ORDERS_ALL);
    }
    switch_away();
}

}  // namespace

void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    siglongjmp(escape, 1);
}

void yield() {
    make_ready(self->index);
    switch_away();
}

void barrier(const char* what, int line, Order order) {
    Fiber* me = (Fiber*)self;
    if (!returned_may_skip_barriers && alive < count)
        fail("divergence: %s is in %s at line %d after %s has returned", place(me->index), what, line,
             place(first(RETURNED)->index));
    if (at_barrier && (barrier_line != line || barrier_name != what))
        fail("divergence: %s is in %s at line %d while others wait in %s at line %d", place(me->index), what, line,
             barrier_name, barrier_line);
    barrier_name = what, barrier_line = line;
    if (++at_barrier == alive) return pass_barrier(order);
    me->state = AT_BARRIER, me->waits_in = what, me->line = line;
    switch_away();
}

void meet(const char* what, int line, void* mine, Compute* compute, void* how, Order order) {
    Fiber* me = (Fiber*)self;
    Simd& simd = simds[me->simd];
    if (simd.returned)
        fail("divergence: %s is in %s at line %d after lane %d of its SIMD group has returned", place(me->index), what,
             line, __builtin_ctz(simd.returned));
    if (simd.arrived && (simd.line != line || (simd.what != what && strcmp(simd.what, what))))
        fail("divergence: %s is in %s at line %d while lanes of its SIMD group wait in %s at line %d", place(me->index),
             what, line, simd.what, simd.line);
    simd.what = what, simd.line = line;
    simd.mine[me->lane] = mine;
    simd.arrived |= 1u << me->lane;
    if (simd.arrived != simd.present) {
        me->state = IN_COLLECTIVE, me->waits_in = what, me->line = line;
        return switch_away();
    }
    compute(simd.mine, how);
    for (int kind = 0; kind < 2; kind++) simd.epoch[kind] += order >> kind & 1;
    simd.arrived = 0;
    const unsigned start = me->simd * LANES;
    release(start, start + LANES < count ? start + LANES : count, IN_COLLECTIVE);
}

// ---- memory: what each place of a buffer and of threadgroup memory has seen

namespace {

struct Access {
    uint32_t group_plus_1, epoch, simd_epoch, pc;  // 0: never accessed
    uint16_t thread;
    bool atomic;
};
struct Cell {
    Access write, read, other_read;  // other_read: the last read by another thread than `read`
};
constexpr uint32_t FILLED = ~0u;  // for group_plus_1: written before the launch
enum Role { INPUT, OUTPUT, FILLED_OUTPUT };

}  // namespace

struct Buffer {
    const char* name;
    char* data;             // the caller's
    uint64_t bytes, first;  // first: byte that the kernel's pointer points at
    uint32_t item;
    uint32_t role;
};

namespace {

struct Region {
    Buffer told;
    char* start;
    Cell* cells;
};

Region regions[64];
unsigned region_count;
char *arena, *group_memory;
uint64_t arena_bytes, group_memory_bytes;
Cell* group_cells;
uintptr_t code;

uint32_t offset_of(const void* pc) { return (uint32_t)((uintptr_t)pc - code - 1); }

const Region* region_at(const char* p) {  // of the arena: the nearest
    for (unsigned i = 0; i < region_count; i++)
        if (p < regions[i].start + regions[i].told.bytes + GAP / 2 + PAGE) return &regions[i];
    return nullptr;
}

[[noreturn]] void fail_outside(const char* p, const char* does, const void* pc) {
    const Region* r = p >= arena && p < arena + arena_bytes ? region_at(p) : nullptr;
    if (!r)
        fail("out of bounds: %s %s memory that belongs to no buffer, at @%x", place(self->index), does, offset_of(pc));
    const Buffer& b = r->told;
    if (p >= r->start && p < r->start + b.bytes)
        fail("%s writes into the input %s, at @%x", place(self->index), b.name, offset_of(pc));
    const long bytes = p - (r->start + b.first), item = b.item;
    const long at = bytes < 0 ? (bytes - item + 1) / item : bytes / item;
    fail("out of bounds: %s %s %s[%ld] of %ld elements, at @%x", place(self->index), does, b.name, at, b.bytes / item,
         offset_of(pc));
}

enum { DEVICE = 1, GROUP = 0 };  // kinds of memory, as epochs count them

bool concurrent(const Access& a, int kind) {
    if (!a.group_plus_1 || a.group_plus_1 == FILLED || (a.thread == self->index && a.group_plus_1 == group_number + 1))
        return false;
    if (a.group_plus_1 != group_number + 1) return kind == DEVICE;
    if (a.epoch != epoch[kind]) return false;
    return a.thread / LANES != self->simd || a.simd_epoch == simds[self->simd].epoch[kind];
}

const char* place_in(const char* buffer, long at) {  // buffer: null for threadgroup memory, which is counted in bytes
    static char text[120];
    snprintf(text, sizeof text, buffer ? "%2$s[%1$ld]" : "byte %1$ld of threadgroup memory", at, buffer);
    return text;
}

// Two threads that write one place are no race if both write the same value. That is known when the second goes on.
struct Rewrite {
    const void* at;  // null: none
    unsigned bytes;
    char value[16], race[512];
} rewrite;

void describe_race(const Access& other, const char* did, const char* does, const char* buffer, long at,
                   const void* pc) {
    char where[64] = "";
    if (other.group_plus_1 != group_number + 1)
        snprintf(where, sizeof where, " of group number %u", other.group_plus_1 - 1);
    snprintf(rewrite.race, sizeof rewrite.race,
             "race: %s %s %s at @%x, which thread %u%s %s at @%x with no barrier between them", place(self->index),
             does, place_in(buffer, at), offset_of(pc), other.thread, where, did, other.pc);
}

struct Touch {
    const void* at;
    unsigned bytes;
    bool reads, writes, atomic;
    const void* pc;
};

void touch_cell(Cell& cell, int kind, const Touch& t, const char* buffer, long at) {
    const bool written = kind == GROUP ? cell.write.group_plus_1 == group_number + 1 : cell.write.group_plus_1;
    if (t.reads && !written)
        fail("uninitialised: %s reads %s, which nobody wrote, at @%x", place(self->index), place_in(buffer, at),
             offset_of(t.pc));
    const char* does = t.atomic && t.writes ? "changes" : t.writes ? "writes" : "reads";
    if (concurrent(cell.write, kind) && !(t.atomic && cell.write.atomic)) {
        describe_race(cell.write, "wrote", does, buffer, at, t.pc);
        if (t.reads || t.bytes > sizeof rewrite.value) fail("%s", rewrite.race);
        rewrite.at = t.at, rewrite.bytes = t.bytes;
        memcpy(rewrite.value, t.at, t.bytes);
    }
    for (int i = 0; i < 2 && t.writes; i++) {
        const Access& read = i ? cell.other_read : cell.read;
        if (!concurrent(read, kind) || (t.atomic && read.atomic)) continue;
        describe_race(read, "read", does, buffer, at, t.pc);
        fail("%s", rewrite.race);
    }
    const Access now = {group_number + 1, epoch[kind],           simds[self->simd].epoch[kind],
                        offset_of(t.pc),  (uint16_t)self->index, t.atomic};
    if (t.writes) cell.write = now;
    if (t.reads) {
        if (cell.read.thread != now.thread || cell.read.group_plus_1 != now.group_plus_1) cell.other_read = cell.read;
        cell.read = now;
    }
}

bool watched(const void* p) {
    return (uint64_t)((char*)p - arena) < arena_bytes || (uint64_t)((char*)p - group_memory) < group_memory_bytes;
}

void touch(const Touch& t) {
    settle();
    const char *p = (const char*)t.at, *last = p + t.bytes - 1;
    if ((uint64_t)(p - arena) < arena_bytes) {
        const Region* r = region_at(p);
        const Buffer& b = r->told;
        const char* end = r->start + b.bytes;
        if (p < r->start || last >= end || (t.writes && b.role == INPUT))
            fail_outside(p < end && last >= end ? end : p, t.writes ? "writes" : "reads", t.pc);
        for (uint64_t i = (p - r->start) / b.item, to = (last - r->start) / b.item; r->cells && i <= to; i++)
            touch_cell(r->cells[i], DEVICE, t, b.name, i);
    } else {
        for (; p <= last; p++) touch_cell(group_cells[p - group_memory], GROUP, t, nullptr, p - group_memory);
    }
}

void on_signal(int number, siginfo_t* info, void* context) {
    const void* pc = (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
    const bool writes = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
    if (number == SIGRTMIN) fail("endless: %s still runs after the time limit", place(self->index));
    if (number == SIGFPE) fail("%s divides and overflows, at @%x", place(self->index), offset_of(pc) + 1);
    const char* p = (const char*)info->si_addr;
    const char* stack = stacks + self->index * (STACK + GUARD);
    if (p >= stack && p < stack + GUARD) fail("%s needs more than %zu bytes of stack", place(self->index), STACK);
    fail_outside(p, writes ? "writes" : "reads", (const char*)pc + 1);
}

void run_group() {
    count = group_size.x * group_size.y * group_size.z;
    alive = count, at_barrier = 0, first_ready = ready_count = 0;
    epoch[0] = epoch[1] = 0;
    memset(simds, 0, sizeof simds);
    if (group_memory) memset(group_memory, 0xff, group_memory_bytes);
    for (unsigned i = 0; i < count; i++) {
        Fiber& f = fibers[i];
        (Thread&)f = {{i % group_size.x, i / group_size.x % group_size.y, i / group_size.x / group_size.y},
                      i,
                      i / LANES,
                      i % LANES};
        f.state = AT_BARRIER;
        simds[f.simd].present |= 1u << f.lane;
        // Stacks at one distance from each other would share cache sets.
        void** top = (void**)(stacks + (i + 1) * (STACK + GUARD) - i % LANES * 128 - 64);
        *--top = nullptr, *--top = (void*)run_thread;
        f.stack_pointer = top - 6;
    }
    release(0, count, AT_BARRIER);
    self = &launcher;
    switch_away();
}

}  // namespace

void settle() {
    const void* at = rewrite.at;
    rewrite.at = nullptr;
    if (at && memcmp(at, rewrite.value, rewrite.bytes)) fail("%s", rewrite.race);
}

void note(const void* p, unsigned bytes, bool reads, bool writes, bool atomic, const void* pc) {
    if (watched(p)) touch({p, bytes, reads, writes, atomic, pc});
}

static uint64_t cells_of(const Buffer& b) { return b.bytes / b.item; }

static void lay_out(Buffer* buffers, unsigned n, void** pointers) {
    const auto whole_pages = [](uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; };
    region_count = n, arena_bytes = GAP;
    for (unsigned i = 0; i < n; i++) arena_bytes += whole_pages(buffers[i].bytes) + GAP;
    arena = (char*)mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char* page = arena + GAP;
    for (unsigned i = 0; i < n; i++) {
        const Buffer& b = buffers[i];
        const uint64_t whole = whole_pages(b.bytes);
        mprotect(page, whole, PROT_READ | PROT_WRITE);
        // As near to the gap behind it as a GPU's alignment lets it.
        Region& r = regions[i] = {b, page + (whole - b.bytes) / 64 * 64, nullptr};
        if (b.role != OUTPUT) memcpy(r.start, b.data, b.bytes);
        if (b.role == INPUT)
            mprotect(page, whole, PROT_READ);
        else
            r.cells = (Cell*)calloc(cells_of(b), sizeof(Cell));
        for (uint64_t c = 0; b.role == FILLED_OUTPUT && c < cells_of(b); c++) r.cells[c].write.group_plus_1 = FILLED;
        pointers[i] = r.start + b.first;
        page += whole + GAP;
    }
}

static void hand_back() {
    for (unsigned i = 0; i < region_count; i++) {
        const Region& r = regions[i];
        const Buffer& b = r.told;
        for (uint64_t c = 0; b.role == OUTPUT && c < cells_of(b) && !message[0]; c++)
            if (!r.cells[c].write.group_plus_1)
                snprintf(message, sizeof message, "unwritten: no thread wrote %s[%lu] of %lu elements", b.name, c,
                         cells_of(b));
        if (b.role != INPUT) memcpy(b.data, r.start, b.bytes);
        free(r.cells);
    }
    munmap(arena, arena_bytes);
    arena = nullptr, arena_bytes = 0, region_count = 0;
}

// Runs `body` with faults and `seconds` of CPU time turned into messages.
template <class F>
static void guarded(double seconds, F body) {
    static char memory[64 << 10];
    stack_t stack = {}, old_stack;
    stack.ss_sp = memory, stack.ss_size = sizeof memory;
    sigaltstack(&stack, &old_stack);
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGRTMIN};
    struct sigaction handler = {}, old[4];
    handler.sa_sigaction = on_signal, handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(signals[i], &handler, &old[i]);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = SIGRTMIN, event._sigev_un._tid = (int)syscall(SYS_gettid);
    timer_t timer;
    timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    itimerspec limit = {};
    limit.it_value = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    timer_settime(timer, 0, &limit, nullptr);
    if (!sigsetjmp(escape, 1)) body();
    timer_delete(timer);
    for (int i = 0; i < 4; i++) sigaction(signals[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
}

template <class F>
static Index each(Index a, Index b, F of) {
    return {of(a.x, b.x), of(a.y, b.y), of(a.z, b.z)};
}
static unsigned smaller(unsigned a, unsigned b) { return a < b ? a : b; }

extern "C" const char* simt_run(const Launch* launch, Buffer* buffers, unsigned buffer_count, void** pointers) {
    if (!stacks) {
        const size_t one = STACK + GUARD;
        stacks = (char*)mmap(nullptr, one * MOST_THREADS, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (int i = 0; i < MOST_THREADS; i++) mprotect(stacks + i * one, GUARD, PROT_NONE);
    }
    Dl_info library;
    dladdr((void*)launch->kernel, &library);
    code = (uintptr_t)library.dli_fbase;
    kernel = launch->kernel;
    schedule = (Schedule)smaller(launch->schedule, RANDOM);
    dice = launch->schedule * 2654435761u | 1;
    returned_may_skip_barriers = launch->returned_may_skip_barriers;
    threads = launch->threads;
    whole_group = each(launch->group, threads, smaller);
    groups = each(threads, whole_group, [](unsigned all, unsigned size) { return (all + size - 1) / size; });
    group_memory = launch->group_memory, group_memory_bytes = launch->group_memory_bytes;
    group_cells = (Cell*)calloc(group_memory_bytes, sizeof(Cell));
    rewrite.at = nullptr;
    message[0] = 0;
    lay_out(buffers, buffer_count, pointers);
    guarded(launch->seconds, [] {
        const unsigned total = groups.x * groups.y * groups.z;
        for (unsigned i = 0; i < total; i++) {
            group_number = schedule == REVERSE ? total - 1 - i : i;
            group = {group_number % groups.x, group_number / groups.x % groups.y, group_number / groups.x / groups.y};
            const Index first = each(group, whole_group, [](unsigned at, unsigned size) { return at * size; });
            const Index left = each(threads, first, [](unsigned all, unsigned before) { return all - before; });
            group_size = each(whole_group, left, smaller);
            run_group();
        }
    });
    hand_back();
    free(group_cells);
    return message[0] ? message : nullptr;
}

}  // namespace simt

// ---- what -fsanitize=thread and -fsanitize=undefined call

#define HOOK(name, reads, writes, parameters, bytes)                                                                \
    extern "C" void __tsan_##name parameters {                                                                      \
        if (simt::watched(p)) simt::touch({p, (unsigned)bytes, reads, writes, false, __builtin_return_address(0)}); \
    }
#define HOOKS(bytes)                                           \
    HOOK(read##bytes, true, false, (void* p), bytes)           \
    HOOK(write##bytes, false, true, (void* p), bytes)          \
    HOOK(unaligned_read##bytes, true, false, (void* p), bytes) \
    HOOK(unaligned_write##bytes, false, true, (void* p), bytes)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
HOOK(read_range, true, false, (void* p, unsigned long n), n)
HOOK(write_range, false, true, (void* p, unsigned long n), n)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

#define FAULT(name, text)                                                                \
    extern "C" void __ubsan_handle_##name##_abort(void*, unsigned long, unsigned long) { \
        simt::fail("%s: %s, at @%x", text, simt::place(simt::self->index),               \
                   simt::offset_of(__builtin_return_address(0)));                        \
    }
FAULT(out_of_bounds, "an index outside an array")
FAULT(shift_out_of_bounds, "a shift by as many bits as the type has, or more")
FAULT(type_mismatch_v1, "a misaligned pointer")
FAULT(divrem_overflow, "a division by zero")
FAULT(missing_return, "no value returned")
