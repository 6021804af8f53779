"""What kernels may read before they wait for the kernels before them (kernels/pdl.py's rules)."""

from __future__ import annotations

# Weights; what was complete when a later kernel without PDL began, as the tables of slots and of
# rotations are, and where the host lays a step out all of that: the embedding's lookup comes after;
# what read_slots and the work list's kernel have published. Whoever adds a name shows that it is
# one of these for every caller: decodes in a graph, steps with chunks with and without one, samples
# behind edits, ranks. Rotations that are computed (dynamic RoPE) are in no graph (hardware.py):
# there nothing without PDL would come after them.
EARLY_READS: dict[str, frozenset[str]] = {
    "_choice_kernel": frozenset({"slots_ptr", "temperatures_ptr", "seeds_ptr"}),
    "_gemv_kernel": frozenset({"weight_ptr", "norm_ptr"}),
    "_qk_norm_rope_store_kernel": frozenset(
        {"q_weight_ptr", "k_weight_ptr", "cos_ptr", "sin_ptr", "positions_ptr", "kv_indices_ptr"}
    ),
    "_qkv_heads_kernel": frozenset({"cos_ptr", "sin_ptr", "positions_ptr", "kv_indices_ptr"}),
    "_rms_norm_kernel": frozenset({"weight_ptr"}),
    "_sum_add_rms_norm_kernel": frozenset({"weight_ptr"}),
    "tile_kernel": frozenset({"weight_from"}),
    "paged_decode_kernel": frozenset({"items_ptr", "block_tables_ptr"}),
}
# They let the next kernel start when they have stored, not before.
PUBLISHING = frozenset({"_build_work_list_kernel", "_read_kernel"})
