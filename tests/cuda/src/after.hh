// After the source of a kernel: how it is launched. A pair of functions for each kernel follows.
namespace software {

template <typename... A, size_t... I>
std::tuple<A...>* copy(void** from, std::index_sequence<I...>) {
    return new std::tuple<A...>(*static_cast<A*>(from[I])...);
}

// The driver copies arguments when a kernel is launched, by the types that the kernel declares.
template <typename... A>
void* pack(void (*)(A...), void** from) {
    return copy<A...>(from, std::index_sequence_for<A...>());
}

// `dims`: grid and block, three numbers each; null to drop the arguments only.
template <typename... A>
void run(void (*kernel)(A...), void* packed, const unsigned int* dims) {
    auto* arguments = static_cast<std::tuple<A...>*>(packed);
    if (dims) {
        gridDim = {dims[0], dims[1], dims[2]};
        blockDim = {dims[3], dims[4], dims[5]};
        auto& b = blockIdx;
        auto& t = threadIdx;
        for (b.z = 0; b.z < gridDim.z; ++b.z)
            for (b.y = 0; b.y < gridDim.y; ++b.y)
                for (b.x = 0; b.x < gridDim.x; ++b.x)
                    for (t.z = 0; t.z < blockDim.z; ++t.z)
                        for (t.y = 0; t.y < blockDim.y; ++t.y)
                            for (t.x = 0; t.x < blockDim.x; ++t.x) std::apply(kernel, *arguments);
    }
    delete arguments;
}

}  // namespace software
