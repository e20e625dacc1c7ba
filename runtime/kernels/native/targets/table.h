// The table of an instruction set whose kernels have been included before. No include guard: see targets/all_kernels.h.

constexpr KernelTable make_table(const char* name, bool (*is_supported)()) {
    return {name,          is_supported,  linear,      expert_hidden, round_row,     dequantize_row,   combine,
            rms_norm,      layer_norm,    rope,        attention,     convolve,      delta_rule,       route,
            exp_row,       silu_row,     search_ranges, nearest_codes, differences, code_sums,     round_columns,    code_systems,
            multiply_systems, solve_systems};
}
