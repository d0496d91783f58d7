// hot_experts: before a layer's experts are multiplied, cold ones that it chose replace resident ones that were used less
// Meaning   docs/internals.md, Hot experts in VRAM     Launcher  cuda_backend/hot_layers.py
// In        layer    the state of a layer's slots: HotLayer
//           choice   choose.cuh, with CHOOSES; otherwise ids [T][k], E and more are no experts. step: its real rows; null: T
// Out       the slots, and the tables from which the next kernels read addresses
// Build     CHOOSES 0 or 1; PER of choose.cuh
// Work      fetch: each CTA computes the same exchanges from a state that no CTA writes, and copies some of their bytes; CTA 0 writes
//           the tables. keep: after the step, a CTA per layer updates the state. count: the same for a prompt, one layer
// Numbers   the products read the same bytes from either memory: exchanges change no result
// Bound     fetch: the link to the host, each byte once
// Tried     Laguna-XS.2, one row on an H200, with 60 % and 30 % of the experts in slots; more in docs/experiments/mixtures.md.
//           the host copies an expert after three misses, on another stream -> 199 and 118 tok/s against 263 and 147
//           by simulation, spare slots that are evicted before they are needed: two, four, six per layer -> 80.9, 80.6, 80.0 % hits with
//             60 % against 81.6
//           by simulation, exchanges that the host notes four steps later, with four spare slots -> 77.2 % against 81.6
//           by simulation, a plain LRU cache of each layer -> 79.2 and 51.8 % against 81.6 and 56.7

#ifndef CHOOSES
#define CHOOSES 0
#endif
#define MOST 512      // experts of a layer
#define SWAPS 16      // most exchanges of a layer in a step
#define LEAVING 32    // experts that may leave
#define FADE 0.985f   // by which a row reduces the scores: cuda_backend/hot_layers.py
#define CHUNK 16384   // bytes that a CTA copies at once
#define MAX_PARTS 6

struct Part {  // of each expert, in host memory and in a slot
    u64* table;      // addresses that products read
    const u8* host;  // of expert 0
    s64 bytes, offset;  // of an expert; from the beginning of a slot
};
struct HotLayer {  // cuda_backend/prototypes.py HOT_LAYER
    Part part[MAX_PARTS];
    s64 parts;
    u8* slots;        // of all layers of its size
    s64 slot_bytes;
    int* slot_of;     // [E], -1: cold
    int* leaving;     // [LEAVING] residents of the lowest scores, ascending, then -1
    int* exchanged;   // their number in this step, then (expert, the one whose slot it took) of each
    int* seen;        // number of ids of this step, its rows, its ids
    float* score;     // [E] uses, each faded by FADE per row
    u64* uses;        // [E] since the start
    u64* counts;      // since the start: experts needed, cold ones in steps, cold ones in prompts, exchanges
};

// Copies a part of an expert: the chunks of this CTA, if they are numbered from `before` on.
__device__ __forceinline__ void copy_part(u8* to, const u8* from, s64 bytes, s64 before) {
    const int first = (int)((blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x);
    for (s64 at = (s64)first * CHUNK; at < bytes; at += (s64)gridDim.x * CHUNK) {
        const int size = (int)min((s64)CHUNK, bytes - at);
        if (bytes % 16) {
            for (int i = threadIdx.x; i < size; i += blockDim.x) to[at + i] = from[at + i];
            continue;
        }
        uint4 v[CHUNK / 4096];
#pragma unroll
        for (int j = 0; j < CHUNK / 4096; j++) {
            const int i = j * 4096 + threadIdx.x * 16;
            if (i < size) v[j] = __ldcg((const uint4*)(from + at + i));
        }
#pragma unroll
        for (int j = 0; j < CHUNK / 4096; j++) {
            const int i = j * 4096 + threadIdx.x * 16;
            if (i < size) *(uint4*)(to + at + i) = v[j];
        }
    }
}

// With one CTA as the least, the compiler does not spill registers to have more of them.
extern "C" __global__ void __launch_bounds__(256, 1)
fetch(const HotLayer* layer, Choice choice, const int* ids, const StepState* step, int T, int k, int E) {
    release_next();  // the next kernel waits before it reads the tables
    __shared__ int chosen[MOST], missed[MOST], coming[SWAPS], going[LEAVING], cold, can_go, exchanges;
    __shared__ float missed_score[MOST], coming_score[SWAPS], going_score[LEAVING];
    const int t = threadIdx.x;
    for (int e = t; e < E; e += 256) chosen[e] = 0;
    if (t == 0) cold = 0;
#if CHOOSES
    __shared__ int best[32];
    float added[PER];
    if (t < 32) biases(added, choice);
    depend();
    if (t < 32)
        choose(choice, choice.logits, k, added, [&](int j, int id, float) {
            if (t == 0) best[j] = id;
        });
    ids = best;
    const int rows = 1;
#else
    depend();
    const int rows = step ? min(T, step->rows) : T;
#endif
    __syncthreads();
    const HotLayer& of = *layer;
    const int pairs = rows * k;
    for (int p = t; p < pairs; p += 256)
        if (ids[p] < E) chosen[ids[p]] = 1;
    __syncthreads();
    for (int e = t; e < E; e += 256) {
        if (!chosen[e] || __ldcg(of.slot_of + e) >= 0) continue;
        const int at = atomicAdd(&cold, 1);
        missed[at] = e, missed_score[at] = __ldcg(of.score + e);
    }
    if (t < 32) {
        const int e = __ldcg(of.leaving + t);
        const bool may = e >= 0 && !chosen[max(e, 0)];
        const u32 all = __ballot_sync(FULL, may);
        const int at = __popc(all & ((1u << t) - 1));
        if (may) going[at] = e, going_score[at] = __ldcg(of.score + e);
        if (t == 0) can_go = __popc(all);
    }
    __syncthreads();
    for (int i = t; i < cold; i += 256) {  // the highest scores come first, whatever their order in `missed`
        int rank = 0;
        for (int j = 0; j < cold; j++)
            rank += missed_score[j] > missed_score[i] || (missed_score[j] == missed_score[i] && missed[j] < missed[i]);
        if (rank < SWAPS) coming[rank] = missed[i], coming_score[rank] = missed_score[i];
    }
    __syncthreads();
    if (t == 0) {
        const int most = min(min(cold, can_go), SWAPS);
        exchanges = 0;
        while (exchanges < most && coming_score[exchanges] + 1.0f / FADE > going_score[exchanges]) exchanges++;
    }
    __syncthreads();
    s64 before = 0;
    for (int n = 0; n < exchanges; n++) {
        u8* slot = of.slots + __ldcg(of.slot_of + going[n]) * of.slot_bytes;
        for (int i = 0; i < of.parts; i++) {
            const Part& part = of.part[i];
            copy_part(slot + part.offset, part.host + coming[n] * part.bytes, part.bytes, before);
            before += (part.bytes + CHUNK - 1) / CHUNK;
            if (blockIdx.x || t) continue;
            part.table[coming[n]] = (u64)(slot + part.offset);
            part.table[going[n]] = (u64)(part.host + going[n] * part.bytes);
        }
    }
    if (blockIdx.x) return;
    for (int p = t; p < pairs; p += 256) of.seen[2 + p] = ids[p];
    if (t < exchanges) of.exchanged[1 + 2 * t] = coming[t], of.exchanged[2 + 2 * t] = going[t];
    if (t == 0) of.seen[0] = pairs, of.seen[1] = rows, of.exchanged[0] = exchanges;
}

// Counts the ids of some rows: uses, and scores as if the uses were spread evenly over the rows.
__device__ __forceinline__ void count_uses(const HotLayer& of, const int* ids, int rows, int pairs, int E, bool prompt) {
    __shared__ int used[MOST], needed, cold;
    const int t = threadIdx.x;
    for (int e = t; e < E; e += 256) used[e] = 0;
    if (t == 0) needed = cold = 0;
    __syncthreads();
    for (int p = t; p < pairs; p += 256)
        if (ids[p] < E) atomicAdd(used + ids[p], 1);
    __syncthreads();
    const float faded = powf(FADE, (float)rows), gain = (1.0f - faded) / ((1.0f - FADE) * rows);
    for (int e = t; e < E; e += 256) {
        of.score[e] = of.score[e] * faded + used[e] * gain;
        of.uses[e] += used[e];
        if (!used[e]) continue;
        atomicAdd(&needed, 1);
        if (of.slot_of[e] < 0) atomicAdd(&cold, 1);
    }
    __syncthreads();
    if (t == 0) of.counts[0] += needed, of.counts[1 + prompt] += cold;
}

// After a step: counts what each layer has seen, notes its exchanges, and lists the experts that may leave next.
extern "C" __global__ void __launch_bounds__(256) keep(const HotLayer* layers, int E) {
    depend();
    const HotLayer& of = layers[blockIdx.x];
    __shared__ float score[MOST];
    __shared__ int exchanges;
    const int t = threadIdx.x, pairs = of.seen[0], rows = of.seen[1];
    if (!pairs) return;
    if (t == 0) exchanges = of.exchanged[0];
    count_uses(of, of.seen + 2, rows, pairs, E, false);
    if (t < exchanges) {
        const int came = of.exchanged[1 + 2 * t], went = of.exchanged[2 + 2 * t];
        of.slot_of[came] = of.slot_of[went], of.slot_of[went] = -1;
    }
    __syncthreads();
    if (t == 0) of.counts[3] += exchanges, of.seen[0] = of.exchanged[0] = 0;
    for (int e = t; e < E; e += 256) score[e] = of.slot_of[e] < 0 ? -1.0f : of.score[e];
    __syncthreads();
    for (int e = t; e < E; e += 256) {
        int rank = score[e] < 0.0f ? LEAVING : 0;
        for (int i = 0; i < E && rank < LEAVING; i++) rank += score[i] >= 0.0f && (score[i] < score[e] || (score[i] == score[e] && i < e));
        if (rank < LEAVING) of.leaving[rank] = e;
    }
}

extern "C" __global__ void __launch_bounds__(256)
count(const HotLayer* layer, const int* ids, const StepState* step, int T, int k, int E) {
    depend();
    const int rows = step ? min(T, step->rows) : T;
    count_uses(*layer, ids, rows, rows * k, E, true);
}
