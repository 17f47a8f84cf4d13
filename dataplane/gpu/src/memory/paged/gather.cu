// Moves an engine's pages to or from a block, tile by tile; compiled by NVRTC when the program starts.
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
__device__ void move_tiles(const Tile* tiles, unsigned int count, bool gather) {
    for (unsigned int n = blockIdx.x; n < count; n += gridDim.x) {
        const Tile tile = tiles[n];
        for (unsigned int unit = threadIdx.x; unit < tile.units; unit += blockDim.x) {
            const unsigned int row = unit / tile.row_units;
            const unsigned int column = unit % tile.row_units;
            Unit* engine = reinterpret_cast<Unit*>(tile.engine + row * tile.engine_stride) + column;
            Unit* block = reinterpret_cast<Unit*>(tile.block + row * tile.block_stride) + column;
            if (gather) {
                *block = *engine;
            } else {
                *engine = *block;
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
