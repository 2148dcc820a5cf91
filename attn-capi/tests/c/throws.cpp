// A C++ exception that leaves a function of the caller's ends the process, in a defined way: std::abort, not undefined behaviour.
// Run by `cargo xtask capi examples`, which expects the signal.
#include <attn.h>

#include <cstdio>
#include <stdexcept>

static double throws(double, std::size_t, std::size_t, std::size_t, std::size_t, void *) { throw std::runtime_error("thrown"); }

int main() try {
    float x[4] = {1, 2, 3, 4}, out[4];
    AttnTensor t{}, to{};
    attn_tensor_contiguous(&t, x, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 1, 1, 4);
    attn_tensor_contiguous(&to, out, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 1, 1, 4);
    AttnOptions options{};
    options.struct_size = sizeof options;
    options.score_mod = throws;
    const AttnStatus status = attn_forward(&options, &t, &t, &t, &to, nullptr, 0);
    std::printf("came back with status %d\n", int(status));
    return 3;
} catch (const std::exception &error) {
    std::printf("came back as an exception: %s\n", error.what());
    return 4;
}
