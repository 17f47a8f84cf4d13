// Runs gather.cu on the processor: the grid of a launch, one thread after the other. For paged/on_host.rs.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define __device__
#define __global__
struct Index {
    unsigned int x;
};
static Index gridDim = {3}, blockDim = {64}, blockIdx, threadIdx;
struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
#include "gather.cu"

static void read(void* to, size_t len) {
    if (fread(to, 1, len, stdin) != len) exit(2);
}

// In: width, direction, number of tiles, bytes of the engine's memory and of the block, as 64-bit numbers; then the
// tiles, with offsets for addresses, and both memories. Out: both memories.
int main() {
    unsigned long long width, gather, count, engine_len, block_len;
    for (auto* number : {&width, &gather, &count, &engine_len, &block_len}) read(number, 8);
    auto* tiles = static_cast<Tile*>(calloc(count + 1, sizeof(Tile)));
    auto* engine = static_cast<char*>(aligned_alloc(16, (engine_len + 16) / 16 * 16));
    auto* block = static_cast<char*>(aligned_alloc(16, (block_len + 16) / 16 * 16));
    read(tiles, count * sizeof(Tile));
    read(engine, engine_len);
    read(block, block_len);
    for (unsigned long long n = 0; n < count; ++n) {
        tiles[n].engine += reinterpret_cast<unsigned long long>(engine);
        tiles[n].block += reinterpret_cast<unsigned long long>(block);
    }
    auto* kernel = width == 16  ? move_16
                   : width == 8 ? move_8
                   : width == 4 ? move_4
                   : width == 2 ? move_2
                                : move_1;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            kernel(tiles, static_cast<unsigned int>(count), static_cast<int>(gather));
        }
    }
    fwrite(engine, 1, engine_len, stdout);
    fwrite(block, 1, block_len, stdout);
    return 0;
}
