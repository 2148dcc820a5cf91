// Attention from C++17: packed q, k, v of one projection, [batch, seq, 3, heads, dim], with a sliding window and a caller's
// function, read where they lie; compared with the formula written out.
//
//     c++ -std=c++17 attention.cpp $(pkg-config --cflags --libs attn) && ./a.out
#include <attn.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::size_t batch = 2, heads = 3, len = 90, dim = 40, left = 20;

void check(AttnStatus status) {
    if (status != ATTN_STATUS_OK) throw std::runtime_error(std::string("attn: ") + attn_last_error());
}

// One of the three tensors of a packed projection.
AttnTensor packed(std::vector<float> &qkv, std::size_t part) {
    AttnTensor t{};
    t.struct_size = sizeof t;
    t.data = qkv.data();
    t.len = qkv.size();
    t.dtype = ATTN_DTYPE_F32;
    const std::size_t shape[] = {batch, heads, len, dim};
    const std::ptrdiff_t row = 3 * heads * dim, strides[] = {std::ptrdiff_t(len) * row, dim, row, 1};
    for (int axis = 0; axis < 4; axis++) t.shape[axis] = shape[axis], t.strides[axis] = strides[axis];
    t.offset = part * heads * dim;
    return t;
}

struct Decay {
    double per_key;
};

extern "C" double decayed(double score, std::size_t, std::size_t, std::size_t query, std::size_t key, void *data) {
    return score - static_cast<Decay *>(data)->per_key * double(query - key); // the window shows no later key
}

} // namespace

int main() try {
    std::vector<float> qkv(batch * len * 3 * heads * dim), out(batch * len * heads * dim);
    for (std::size_t i = 0; i < qkv.size(); i++) qkv[i] = float(std::sin(double(i * i % 9973)));

    AttnTensor q = packed(qkv, 0), k = packed(qkv, 1), v = packed(qkv, 2), o;
    check(attn_tensor_contiguous(&o, out.data(), ATTN_DTYPE_F32, ATTN_LAYOUT_BSHD, batch, heads, len, dim));
    Decay decay{0.05};
    AttnOptions options{};
    options.struct_size = sizeof options;
    options.window = ATTN_ALIGN_TOP_LEFT;
    options.window_left = left; // itself and the 20 keys before
    options.score_mod = decayed;
    options.user_data = &decay;

    AttnShape shape{sizeof shape, batch, heads, heads, len, len, dim, dim};
    AttnPlan *raw = nullptr;
    check(attn_plan_create(&options, &shape, &raw));
    std::unique_ptr<AttnPlan, decltype(&attn_plan_destroy)> plan(raw, attn_plan_destroy);
    check(attn_plan_run(plan.get(), nullptr, &q, &k, &v, &o, nullptr, 0));

    double worst = 0;
    const auto at = [&](std::size_t part, std::size_t b, std::size_t h, std::size_t s, std::size_t d) {
        return double(qkv[(((b * len + s) * 3 + part) * heads + h) * dim + d]);
    };
    for (std::size_t b = 0; b < batch; b++)
        for (std::size_t h = 0; h < heads; h++)
            for (std::size_t i = 0; i < len; i++) {
                const std::size_t first = i > left ? i - left : 0;
                std::vector<double> weight;
                double sum = 0;
                for (std::size_t j = first; j <= i; j++) {
                    double score = 0;
                    for (std::size_t d = 0; d < dim; d++) score += at(0, b, h, i, d) * at(1, b, h, j, d);
                    weight.push_back(std::exp(score / std::sqrt(double(dim)) - decay.per_key * double(i - j)));
                    sum += weight.back();
                }
                for (std::size_t d = 0; d < dim; d++) {
                    double want = 0;
                    for (std::size_t j = first; j <= i; j++) want += weight[j - first] / sum * at(2, b, h, j, d);
                    worst = std::fmax(worst, std::fabs(want - out[((b * len + i) * heads + h) * dim + d]));
                }
            }
    std::printf("attn %s from C++: largest difference from the formula: %.1e\n", attn_version(), worst);
    std::puts(worst < 1e-5 ? "ok" : "WRONG");
    return !(worst < 1e-5);
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
