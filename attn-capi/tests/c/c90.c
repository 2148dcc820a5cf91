/* A C90 program: the header's comments, and an INIT macro for each struct. Prints nothing if all is well. */
#include <attn.h>
#include <string.h>

int main(void) {
    float data[6] = {1, 2, 3, 4, 5, 6}, result[6] = {0, 0, 0, 0, 0, 0};
    AttnTensor x = ATTN_TENSOR_INIT, out = ATTN_TENSOR_INIT;
    AttnOptions options = ATTN_OPTIONS_INIT;
    AttnCache cache = ATTN_CACHE_INIT;
    AttnQueries queries = ATTN_QUERIES_INIT;
    AttnShape shape = ATTN_SHAPE_INIT;
    if (options.struct_size != sizeof options || options.causal != 0 || options.level != NULL) return 1;
    if (x.struct_size != sizeof x || x.data != NULL) return 2;
    if (cache.struct_size != sizeof cache || queries.struct_size != sizeof queries) return 3;
    if (shape.struct_size != sizeof shape) return 4;
    if (attn_tensor_contiguous(&x, data, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 1, 3, 2) != ATTN_STATUS_OK) return 5;
    if (attn_tensor_contiguous(&out, result, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 1, 3, 2) != ATTN_STATUS_OK) return 6;
    options.window = ATTN_ALIGN_TOP_LEFT;
    options.window_left = ATTN_UNBOUNDED; /* and 0 to the right: causal */
    if (attn_forward(&options, &x, &x, &x, &out, NULL, 0) != ATTN_STATUS_OK) return 7;
    return memcmp(data, result, 2 * sizeof(float)) == 0 ? 0 : 8; /* the first query sees only itself */
}
