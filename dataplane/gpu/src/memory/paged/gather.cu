// Moves an engine's pages to or from a block, tile by tile. gather.ptx is made from it: make_ptx.py.
// One thread block takes a tile at a time, one thread a unit of it. paged/tiles.rs cuts the tiles and checks this
// arithmetic.

struct Tile {
    unsigned long long engine;
    unsigned long long block;
    unsigned long long engine_stride;
    unsigned long long block_stride;
    unsigned int row_units;
    unsigned int units;
};
static_assert(sizeof(Tile) == 40, "as in paged/tiles.rs");

template <typename Unit>
__device__ Unit* at(unsigned long long address, unsigned long long stride, const Tile& tile, unsigned int unit) {
    return reinterpret_cast<Unit*>(address + unit / tile.row_units * stride) + unit % tile.row_units;
}

// Units that a thread has read before it writes the first: memory of the host is far away.
constexpr unsigned int AHEAD = 4;

template <typename Unit>
__device__ void move_tiles(const Tile* tiles, unsigned int count, bool gather) {
    for (unsigned int n = blockIdx.x; n < count; n += gridDim.x) {
        const Tile tile = tiles[n];
        const unsigned long long from = gather ? tile.engine : tile.block, to = gather ? tile.block : tile.engine;
        const unsigned long long from_stride = gather ? tile.engine_stride : tile.block_stride;
        const unsigned long long to_stride = gather ? tile.block_stride : tile.engine_stride;
        for (unsigned int first = threadIdx.x; first < tile.units; first += AHEAD * blockDim.x) {
            Unit units[AHEAD];
#pragma unroll
            for (unsigned int i = 0; i < AHEAD; ++i) {
                const unsigned int unit = first + i * blockDim.x;
                if (unit < tile.units) units[i] = *at<Unit>(from, from_stride, tile, unit);
            }
#pragma unroll
            for (unsigned int i = 0; i < AHEAD; ++i) {
                const unsigned int unit = first + i * blockDim.x;
                if (unit < tile.units) *at<Unit>(to, to_stride, tile, unit) = units[i];
            }
        }
    }
}

extern "C" __global__ void move_16(const Tile* tiles, unsigned int count, int gather) {
    move_tiles<uint4>(tiles, count, gather);
}
extern "C" __global__ void move_8(const Tile* tiles, unsigned int count, int gather) {
    move_tiles<uint2>(tiles, count, gather);
}
extern "C" __global__ void move_4(const Tile* tiles, unsigned int count, int gather) {
    move_tiles<unsigned int>(tiles, count, gather);
}
extern "C" __global__ void move_2(const Tile* tiles, unsigned int count, int gather) {
    move_tiles<unsigned short>(tiles, count, gather);
}
extern "C" __global__ void move_1(const Tile* tiles, unsigned int count, int gather) {
    move_tiles<unsigned char>(tiles, count, gather);
}
