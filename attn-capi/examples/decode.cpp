// An endless stream from C++17: a cache of fixed size that keeps the first tokens and the last ones (StreamingLLM), in bfloat16, and
// the part of it that two machines would share; compared with the formula written out.
//
//     c++ -std=c++17 decode.cpp $(pkg-config --cflags --libs attn) && ./a.out
#include <attn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::size_t heads = 2, dim = 32, sinks = 4, window = 28, slots = sinks + window;

void check(AttnStatus status) {
    if (status != ATTN_STATUS_OK) throw std::runtime_error(std::string("attn: ") + attn_last_error());
}

// A float cut to bfloat16, as bits: numbers that have no more digits than that.
std::uint16_t bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return std::uint16_t(bits >> 16);
}

float wide(std::uint16_t x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// What a model would compute for a token: its query, key or value.
std::vector<std::uint16_t> row(int kind, std::size_t token) {
    std::vector<std::uint16_t> x(heads * dim);
    for (std::size_t i = 0; i < x.size(); i++) x[i] = bf16(float(std::sin(kind * 5.0 + double(token) * 1.3 + double(i) * 0.7)));
    return x;
}

template <typename T> AttnTensor tensor(std::vector<T> &data, AttnDtype dtype, std::size_t seq) {
    AttnTensor t{};
    check(attn_tensor_contiguous(&t, data.data(), dtype, ATTN_LAYOUT_BHSD, 1, heads, seq, dim));
    return t;
}

} // namespace

int main() try {
    std::vector<std::uint16_t> k(heads * slots * dim), v(k.size());
    const AttnTensor tk = tensor(k, ATTN_DTYPE_BF16, slots), tv = tensor(v, ATTN_DTYPE_BF16, slots);
    std::size_t seen = 0;
    AttnCache cache{};
    cache.struct_size = sizeof cache;
    cache.kind = ATTN_CACHE_KIND_RING;
    cache.k = &tk, cache.v = &tv;
    cache.lens = &seen, cache.lens_len = 1;
    cache.sinks = sinks, cache.window = window;

    double worst = 0;
    for (std::size_t token = 0; token < 200; token++) {
        auto q = row(0, token), key = row(1, token), value = row(2, token);
        std::vector<float> out(heads * dim);
        const AttnTensor tq = tensor(q, ATTN_DTYPE_BF16, 1), to = tensor(out, ATTN_DTYPE_F32, 1);
        const AttnTensor key_new = tensor(key, ATTN_DTYPE_BF16, 1), value_new = tensor(value, ATTN_DTYPE_BF16, 1);
        check(attn_cache_append(&cache, &key_new, &value_new, nullptr, 0)); // the oldest one behind the sinks goes
        check(attn_decode(nullptr, &cache, &tq, nullptr, &to, nullptr, 0));

        for (std::size_t h = 0; h < heads; h++) {
            std::vector<double> want(dim);
            double sum = 0;
            for (std::size_t j = 0; j <= token; j++) {
                if (j >= sinks && token - j >= window) continue; // has gone
                const auto kj = row(1, j), vj = row(2, j);
                double score = 0;
                for (std::size_t d = 0; d < dim; d++) score += double(wide(q[h * dim + d])) * wide(kj[h * dim + d]);
                const double weight = std::exp(score / std::sqrt(double(dim)));
                sum += weight;
                for (std::size_t d = 0; d < dim; d++) want[d] += weight * wide(vj[h * dim + d]);
            }
            for (std::size_t d = 0; d < dim; d++) worst = std::fmax(worst, std::fabs(want[d] / sum - out[h * dim + d]));
        }
    }
    std::printf("%zu tokens through %zu slots: largest difference from the formula: %.1e\n", seen, slots, worst);

    // Attention to two halves of the keys, perhaps on two machines: states are merged.
    const AttnShape shape{sizeof shape, 1, heads, heads, 1, slots, dim, dim};
    AttnPlan *plan = nullptr;
    check(attn_plan_create(nullptr, &shape, &plan));
    std::size_t len = 0;
    check(attn_plan_state_len(plan, &len));
    auto q = row(0, 0);
    std::vector<float> states(len), others(len), whole(heads * dim), merged(heads * dim);
    const AttnTensor tq = tensor(q, ATTN_DTYPE_BF16, 1), to_whole = tensor(whole, ATTN_DTYPE_F32, 1);
    AttnTensor half_k = tk, half_v = tv;
    half_k.shape[2] = half_v.shape[2] = slots / 2;
    check(attn_plan_state(plan, nullptr, 0, &tq, &half_k, &half_v, states.data(), len));
    half_k.offset = half_v.offset = slots / 2 * dim;
    check(attn_plan_state(plan, nullptr, slots / 2, &tq, &half_k, &half_v, others.data(), len));
    check(attn_merge_states(states.data(), others.data(), len, dim));
    const AttnTensor to_merged = tensor(merged, ATTN_DTYPE_F32, 1);
    check(attn_plan_finish(plan, states.data(), len, &to_merged, nullptr, 0));
    check(attn_plan_run(plan, nullptr, &tq, &tk, &tv, &to_whole, nullptr, 0));
    attn_plan_destroy(plan);
    double apart = 0;
    for (std::size_t i = 0; i < whole.size(); i++) apart = std::fmax(apart, std::fabs(double(whole[i]) - merged[i]));
    std::printf("two parts merged: largest difference from one call: %.1e\n", apart);
    const bool fine = worst < 1e-5 && apart < 1e-6;
    std::puts(fine ? "ok" : "WRONG");
    return !fine;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
