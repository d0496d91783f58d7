// plane: addresses of the rows of a cache: keys, values or latents; a row is the bytes of one position. Without a table the rows
// are [slot][head][place]; with a table they are in pages, [page][head][PAGE], whose numbers the table lists for each slot.

#define PAGE 256  // positions; a multiple of every tile

struct Plane {  // cuda_backend/caches/planes.py PLANE
    u8* rows;
    const int* table;  // [slot][pages], or null
    s64 block;          // bytes from a slot, or a page, to the next
    int row, capacity;  // bytes of a row, rows of a head in a block
    int fixed, ring;    // the first `fixed` positions in order, after them the others in a ring
    int pages;
};
__device__ __forceinline__ int place_of(const Plane& p, int position) {
    return position < p.fixed ? position : p.fixed + (position - p.fixed) % p.ring;
}

// The address of row `place` of a head, if rows of the plane have the constant size `bytes`. A tile's rows are adjacent.
__device__ __forceinline__ u8* row_at(const Plane& p, int slot, int head, int place, int bytes) {
    if (p.table) slot = p.table[slot * p.pages + place / PAGE], place %= PAGE;
    return p.rows + slot * p.block + (s64)(head * p.capacity + place) * bytes;
}

// The plane of the sequence in a slot.
__device__ __forceinline__ Plane of_slot(Plane p, int slot) {
    if (p.table)
        p.table += slot * p.pages;
    else
        p.rows += slot * p.block;
    return p;
}

// The rows of a head of a plane that is one sequence's, in its first block or, with a table, in page 0.
__device__ __forceinline__ u8* head_at(const Plane& p, int head, int bytes) { return p.rows + (s64)head * p.capacity * bytes; }

// The tile that begins at a position, of a plane that is one sequence's and whose `rows` are a head's.
__device__ __forceinline__ const u8* tile_at(const Plane& p, int position, int bytes) {
    int place = place_of(p, position);
    const u8* rows = p.rows;
    if (p.table) rows += p.table[place / PAGE] * p.block, place %= PAGE;
    return rows + (s64)place * bytes;
}

// The rows of one head of one sequence, for kernels that have no registers to find them in a plane.
struct HeadRows {
    const u8* rows;
    const int* table;
    s64 block;
    // Where the page of a place begins, after `rows`; the place becomes that in its page. All planes of a store share pages.
    __device__ __forceinline__ s64 page_of(int& place) const {
        if (!table) return 0;
        const s64 page = table[place / PAGE];
        place %= PAGE;
        return page * block;
    }
    __device__ __forceinline__ const u8* at(int place, int bytes) const {
        const u8* begin = rows + page_of(place);
        return begin + (s64)place * bytes;
    }
};
__device__ __forceinline__ HeadRows rows_of(const Plane& p, int slot, int head, int bytes) {
    const u8* rows = p.rows + (p.table ? 0 : slot * p.block) + (s64)head * p.capacity * bytes;
    return {rows, p.table ? p.table + slot * p.pages : 0, p.block};
}
