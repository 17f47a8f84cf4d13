// Before the source of a kernel: what CUDA's C++ has and plain C++ does not.
#include <cstddef>
#include <tuple>
#include <utility>

#define __device__
#define __global__

struct Index {
    unsigned int x = 0, y = 0, z = 0;
};
// One kernel runs at a time, one thread of it after the other.
static Index gridDim, blockDim, blockIdx, threadIdx;
struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
